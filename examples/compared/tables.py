"""The messages and tables that all programs share, not counted; run the programs in examples/."""

from pydantic import BaseModel
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

DATABASE = "postgresql+psycopg://localhost/shop"


class PlaceOrder(BaseModel):
    id: str


class OrderPlaced(BaseModel):
    id: str


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


class Invoice(Base):
    __tablename__ = "invoices"
    number: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]
