"""A store on a PostgreSQL server. Needs the extra `postgres`."""

from __future__ import annotations

from rt.errors import RtError

try:
    import psycopg  # noqa: F401
except ImportError as error:
    raise RtError("psycopg is not installed", hint="pip install 'rt-transport[postgres]'") from error
