"""Search over passages: `build(rows, folder, ...)` makes an index once, `open_index(folder).search(queries, k)` uses it.

passages  rows in, one file of passages out, mapped into memory
words     what of a text is searched for
bm25      by words; the default
dense     by vectors of any encoder: FAISS, or plain products
folder    an index on disk: whole or not at all, and known by what it was made from
index     builds and opens them
batching  many askers, one search at a time
server    the HTTP server, which speaks the protocol of Search-R1;   protocol: what is said there
worker    the process that searches for all workers of a run

No torch here but in encoders.
"""
