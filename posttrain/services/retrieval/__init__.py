"""Search over passages: `build(rows, folder, ...)` makes an index once, `open_index(folder).search(queries, k)` uses it.

passages       converts rows to one memory-mapped file of passages
words          the words of a text for search
bm25           search by words; the default
dense          search by vectors of any encoder: FAISS, or plain products
index_folder   an index on disk: written atomically, and checked against its sources
passage_index  builds and opens indices
batcher        combines concurrent requests, one search at a time
search_server  the HTTP server, with the protocol of Search-R1 (search_protocol)
search_worker  the process that searches for all workers of a run

torch is used in encoders only.
"""
