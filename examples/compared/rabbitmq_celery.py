"""celery -A compared.rabbitmq_celery worker; the inbox is written by hand."""

from typing import Any

from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Mapped, mapped_column, sessionmaker

from compared.tables import DATABASE, Base, Invoice, OrderPlaced

celery = Celery("billing", broker="amqp://localhost")
celery.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)
sessions = sessionmaker(create_engine(DATABASE))


class Seen(Base):
    __tablename__ = "inbox_by_hand"
    id: Mapped[str] = mapped_column(primary_key=True)


@celery.task(bind=True, autoretry_for=(Exception,))  # type: ignore[untyped-decorator]
def bill(task: Any, data: str) -> None:
    placed = OrderPlaced.model_validate_json(data)
    with sessions.begin() as session:
        new = insert(Seen).values(id=task.request.id).on_conflict_do_nothing()
        if session.execute(new.returning(Seen.id)).first():
            session.add(Invoice(order=placed.id))
