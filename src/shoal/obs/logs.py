"""Logs: one line per event, as text for people or as JSON for machines.

Extra fields of a log call (`log.info("done", extra={"fields": {...}})`) are written after the message. Owns formats,
not what is logged.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


def set_up_logs(level: str, style: str = "text") -> None:
    """Write Shoal's log to standard error in this format; of other libraries only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(level.upper())


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found = getattr(record, "fields", None)
    return found if isinstance(found, dict) else {}


class TextLines(logging.Formatter):
    """12:30:01 INFO server: request id=… status=200"""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        room = record.name.removeprefix("shoal.")
        fields = " ".join(f"{key}={one_line(value)}" for key, value in fields_of(record).items())
        line = f"{at} {record.levelname} {room}: {record.getMessage()}" + (f" {fields}" if fields else "")
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def one_line(value: Any) -> str:
    """A value that cannot forge another line or field."""
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=\\') or not text.isprintable() else text
