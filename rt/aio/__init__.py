"""`rt.aio.Publisher` and `rt.aio.Subscriber`: the clients for event loops."""

from rt.aio.publisher import Delivery as Delivery
from rt.aio.publisher import Publisher as Publisher
from rt.aio.subscriber import Subscriber as Subscriber
