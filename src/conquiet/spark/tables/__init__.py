"""Tables of Parquet files, as Delta or plain: each batch once, partitions replaced as a whole."""
