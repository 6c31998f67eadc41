"""faststream run compared.rabbitmq_faststream:app; the inbox is written by hand."""

from faststream import AckPolicy, FastStream
from faststream.rabbit import RabbitBroker, RabbitQueue
from faststream.rabbit.annotations import RabbitMessage
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Mapped, mapped_column

from compared.tables import DATABASE, Base, Invoice, OrderPlaced

broker = RabbitBroker("amqp://localhost")
app = FastStream(broker)
sessions = async_sessionmaker(create_async_engine(DATABASE))


class Seen(Base):
    __tablename__ = "inbox_by_hand"
    id: Mapped[str] = mapped_column(primary_key=True)


@broker.subscriber(RabbitQueue("orders", durable=True), ack_policy=AckPolicy.NACK_ON_ERROR)
async def bill(placed: OrderPlaced, message: RabbitMessage) -> None:
    async with sessions.begin() as session:
        new = insert(Seen).values(id=message.correlation_id).on_conflict_do_nothing()
        if (await session.execute(new.returning(Seen.id))).first():
            session.add(Invoice(order=placed.id))
