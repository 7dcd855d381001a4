"""Jobs whose hosts split the rows of a table and do not communicate."""
