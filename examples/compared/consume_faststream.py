"""faststream run compared.consume_faststream:app; the inbox is written by hand."""

from faststream import AckPolicy, FastStream
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.annotations import RedisStreamMessage
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Mapped, mapped_column

from compared.tables import DATABASE, Base, Invoice, OrderPlaced

broker = RedisBroker("redis://localhost")
app = FastStream(broker)
sessions = async_sessionmaker(create_async_engine(DATABASE))
orders = StreamSub("orders", group="billing", consumer="billing-1", min_idle_time=60_000)


class Seen(Base):
    __tablename__ = "inbox_by_hand"
    id: Mapped[str] = mapped_column(primary_key=True)


@broker.subscriber(stream=orders, ack_policy=AckPolicy.NACK_ON_ERROR)
async def bill(placed: OrderPlaced, message: RedisStreamMessage) -> None:
    async with sessions.begin() as session:
        new = insert(Seen).values(id=message.correlation_id).on_conflict_do_nothing()
        if (await session.execute(new.returning(Seen.id))).first():
            session.add(Invoice(order=placed.id))
