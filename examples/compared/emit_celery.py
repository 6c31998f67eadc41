"""uvicorn …:web, and celery -A … worker -B; an outbox and its relay are written by hand."""

from celery import Celery
from fastapi import FastAPI
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Mapped, mapped_column, sessionmaker

from compared.tables import DATABASE, Base, Order, OrderPlaced, PlaceOrder

celery = Celery("shop", broker="redis://localhost")
celery.conf.beat_schedule = {"publish": {"task": "publish", "schedule": 0.5}}
sessions = sessionmaker(create_engine(DATABASE))
web = FastAPI()


class Event(Base):
    __tablename__ = "outbox_by_hand"
    id: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[str]


@celery.task(name="publish")  # type: ignore[untyped-decorator]
def publish() -> None:
    oldest = select(Event).order_by(Event.id).limit(100).with_for_update(skip_locked=True)
    with sessions.begin() as session:
        for event in session.scalars(oldest):
            celery.send_task("compared.consume_celery.bill", [event.data], task_id=str(event.id))
            session.delete(event)


@web.post("/orders", status_code=201)
def place_order(order: PlaceOrder) -> None:
    with sessions.begin() as session:
        session.add(Order(id=order.id))
        session.add(Event(data=OrderPlaced(id=order.id).model_dump_json()))
