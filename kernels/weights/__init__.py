"""What an adapter's weights look like: shapes, one packed block, the tables that say where its parts are."""
