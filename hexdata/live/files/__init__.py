"""Files that a live directory receives: found, watched and remembered."""
