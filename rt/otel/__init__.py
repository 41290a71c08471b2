"""`rt.otel`: traces and metrics by OpenTelemetry. Needs the extra `rt-transport[otel]`; `import rt` does not.

Names and attributes follow the semantic conventions of OpenTelemetry for messaging:
https://opentelemetry.io/docs/specs/semconv/messaging/. Attributes of rt begin with `messaging.rt.`, metrics
with `rt.client.`.

Invariants:
- Headers that carry a trace context keep it. The span of the publisher then links to it.
- A header that is not a valid context counts as none, and is never an error.
"""

try:
    import opentelemetry.trace  # noqa: F401 - says which extra is missing
except ImportError as error:
    raise ImportError("rt.otel needs opentelemetry-api: pip install 'rt-transport[otel]'") from error

from rt.otel.client_metrics import observe
from rt.otel.spans import extract, inject, process
from rt.otel.stream_tracing import StreamTracing
from rt.otel.traced_publisher import TracedPublisher

__all__ = ["StreamTracing", "TracedPublisher", "extract", "inject", "observe", "process"]
