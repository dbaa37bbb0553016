"""A local web page that shows the games and positions of a store."""

from hexdata.browse.library import BrowseOptions
from hexdata.browse.server import browse_store, serving

__all__ = ["BrowseOptions", "browse_store", "serving"]
