"""Assignment of positions to games, flags of suspicious games, and interpretation of labels.

Works on raw batches and tables in memory. It opens no files and repairs no data.
"""
