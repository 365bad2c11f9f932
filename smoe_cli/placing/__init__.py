"""What smoe cocluster does: problems from tables, solved, compared, and contracted to what is served."""
