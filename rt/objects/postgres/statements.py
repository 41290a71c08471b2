"""The SQL of readers and writers.

A reader's statements also return whether the reader's program still owns the store.
"""

from __future__ import annotations

from typing import Final, LiteralString

GET: Final[LiteralString] = """
SELECT i.owner = %s, i.fence, r.* FROM information AS i LEFT JOIN LATERAL
  (SELECT key, page, pages, value, checksum, long_category, long_key FROM rows
     WHERE category = %s AND key = %s) AS r ON true
  ORDER BY r.page"""
"""The pages of one row."""

ROWS: Final[LiteralString] = """
SELECT i.owner = %s, i.fence, r.* FROM information AS i LEFT JOIN LATERAL
  (SELECT key, page, pages, value, checksum, long_category, long_key FROM
     (SELECT *, sum(octet_length(value)) OVER (ORDER BY key, page ROWS UNBOUNDED PRECEDING) AS total
        FROM rows WHERE category = %s AND (key, page) > (%s, %s) ORDER BY key, page LIMIT %s) AS f
     WHERE total - octet_length(value) < %s) AS r ON true
  ORDER BY r.key, r.page"""
"""The next pages of a category, up to a limit of pages and a limit of bytes, but at least one page."""

CATEGORIES: Final[LiteralString] = """
SELECT i.owner = %s, i.fence, r.* FROM information AS i LEFT JOIN LATERAL
  (WITH RECURSIVE found AS (
      (SELECT category, long_category FROM rows
         WHERE category >= %s AND category < %s ORDER BY category LIMIT 1)
      UNION ALL
      SELECT n.* FROM found AS f CROSS JOIN LATERAL
        (SELECT category, long_category FROM rows
           WHERE category > f.category AND category < %s ORDER BY category LIMIT 1) AS n)
    SELECT category, long_category FROM found) AS r ON true"""
"""The categories from one name to another: one index lookup each."""

ALL_ROWS: Final[LiteralString] = """
SELECT category, key, page, pages, value, checksum, long_category, long_key FROM
  (SELECT *, sum(octet_length(value)) OVER
         (ORDER BY category, key, page ROWS UNBOUNDED PRECEDING) AS total
     FROM rows WHERE (category, key, page) > (%s, %s, %s) ORDER BY category, key, page LIMIT %s) AS f
  WHERE total - octet_length(value) < %s ORDER BY category, key, page"""

CATEGORY_SIZES: Final[LiteralString] = """
SELECT coalesce(long_category, category), count(*) FILTER (WHERE page = 0), sum(octet_length(value))::bigint
  FROM rows GROUP BY 1"""

PUT: Final[LiteralString] = """
INSERT INTO rows (category, key, page, pages, value, checksum)
  SELECT r.category, r.key, 0, 1, r.value, r.checksum
    FROM unnest(%s::bytea[], %s::bytea[], %s::bytea[], %s::bigint[]) AS r (category, key, value, checksum)
  ON CONFLICT (category, key, page) DO UPDATE SET pages = excluded.pages, value = excluded.value,
    checksum = excluded.checksum"""
"""Rows of one page and with short names."""

PUT_PAGES: Final[LiteralString] = """
INSERT INTO rows (category, key, page, pages, value, checksum, long_category, long_key)
  SELECT * FROM unnest(%s::bytea[], %s::bytea[], %s::bigint[], %s::bigint[], %s::bytea[], %s::bigint[],
    %s::bytea[], %s::bytea[])
  ON CONFLICT (category, key, page) DO UPDATE SET pages = excluded.pages, value = excluded.value,
    checksum = excluded.checksum"""

TRIM: Final[LiteralString] = """
DELETE FROM rows USING unnest(%s::bytea[], %s::bytea[], %s::bigint[]) AS r (category, key, pages)
  WHERE rows.category = r.category AND rows.key = r.key AND rows.page >= r.pages"""
"""Delete the last pages of values that were longer before."""

DELETE: Final[LiteralString] = "DELETE FROM rows WHERE category = %s AND key = ANY(%s::bytea[])"

CLEAR: Final[LiteralString] = "DELETE FROM rows WHERE category = %s"

CLEAR_TREE: Final[LiteralString] = """
DELETE FROM rows WHERE category >= %s AND category < %s AND (coalesce(long_category, category) = %s
  OR coalesce(long_category, category) >= %s AND coalesce(long_category, category) < %s)"""

BEGIN: Final[LiteralString] = """
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT store_id, number, fence, owner, pages_max FROM information FOR UPDATE"""
"""READ COMMITTED, so that statements after the lock see the commits of the previous owner."""

SET_PAGES_MAX: Final[LiteralString] = "UPDATE information SET pages_max = %s"

COMMIT: Final[LiteralString] = """
UPDATE information SET number = number + 1; SET LOCAL statement_timeout = 0; COMMIT"""
"""No timeout of the server: it would end the server's wait for a standby, and report the commit as made."""
