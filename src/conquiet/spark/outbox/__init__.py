"""An outbox on Spark: the format `conquiet-outbox`, in the columns of the event log."""
