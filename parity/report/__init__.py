"""Reports of a comparison for people: a table in the terminal, and one page with plots."""
