"""`rt streams`: hosts of streams, and the subscriptions that their clusters keep."""
