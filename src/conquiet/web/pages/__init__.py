"""The pages, one module per entry of the menu, each with its `routes`."""
