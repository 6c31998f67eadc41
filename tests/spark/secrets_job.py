"""A driver whose web pages are looked at, in a process of its own; keeps every page as a file."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from conquiet.embedded.server import free_port
from conquiet.spark import session

_MOST_PAGES = 400
_link = re.compile(r'href="([^"#]+)"')


def run(redis: str, database: str, nowhere: str, directory: str) -> dict[str, Any]:
    place = Path(directory)
    config = {
        "spark.ui.enabled": "true",
        "spark.ui.port": str(free_port()),
        "spark.ui.killEnabled": "false",
        "spark.log.level": "INFO",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(place / "local"),
        "spark.sql.warehouse.dir": str(place / "warehouse"),
    }
    spark = session("secrets", master="local[2]", config=config)
    log = {"url": redis, "streams": "orders", "startingOffsets": "earliest"}
    events = spark.read.format("conquiet").options(**log).load()
    found = {"read": events.where("type = 'sold'").count()}
    writing = spark.readStream.format("conquiet").options(**log).load().drop("stream").writeStream
    copying = writing.format("conquiet").options(url=redis, topic="copies")
    _finish(copying.option("checkpointLocation", str(place / "copies")))
    rows = spark.readStream.format("conquiet-outbox").option("url", database).load()
    upserting = rows.select("event_id").writeStream.format("conquiet-upsert")
    upserting = upserting.options(url=database, table="copies", keys="event_id")
    _finish(upserting.option("checkpointLocation", str(place / "upserts")))
    for format, url in (("conquiet-outbox", nowhere), ("conquiet", redis.replace("redis:", "no:"))):
        try:
            spark.read.format(format).options(url=url, **_streams(format)).load().count()
        except Exception as error:
            (place / f"error-{format}").write_text(str(error))
    pages = _pages(spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId)
    (place / "pages.json").write_text(json.dumps(pages))
    spark.stop()
    return found | {"pages": len(pages)}


def _streams(format: str) -> dict[str, str]:
    return {"streams": "orders"} if format == "conquiet" else {}


def _finish(writing: Any) -> None:
    writing.trigger(availableNow=True).start().awaitTermination()


def _pages(root: str, application: str) -> dict[str, str]:
    """What the user interface and its REST interface show, page by page."""
    rest = f"/api/v1/applications/{application}"
    lists = ("environment", "sql?details=true&planDescription=true", "jobs", "stages?details=true")
    left = ["/", *(f"{rest}/{name}" for name in (*lists, "allexecutors"))]
    shown: dict[str, str] = {}
    while left and len(shown) < _MOST_PAGES:
        page = left.pop(0)
        if page in shown:
            continue
        try:
            with urllib.request.urlopen(urljoin(root, page), timeout=30) as answer:
                shown[page] = answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            shown[page] = f"{error.code}: {error.read().decode(errors='replace')}"
        for link in _link.findall(shown[page]):
            target = urlsplit(urljoin(urljoin(root, page), link.replace("&amp;", "&")))
            if root.endswith(target.netloc) and "/static/" not in target.path:
                left.append(f"{target.path}?{target.query}" if target.query else target.path)
    return shown


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:])))
