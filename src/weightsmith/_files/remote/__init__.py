"""Files that are read where they are: on the Hub, behind https, in an object store.

addresses.py  what an address names; variables of the environment that clients read, checked before they do
retries.py    a run of bytes from a server that may fail, within a bound; which failures pass, for every client
http.py       one request for a run of bytes, checked
stores.py     the same of S3, GCS and Azure, by the package obstore; endpoints and keys
ahead.py      what a plan will read, fetched before it is read, in large requests, several at a time; where bytes wait
folder.py     a model's folder behind https or in an object store, and its files as sources read them

The Hub itself is in `weightsmith._files.hub`, which uses these.
"""

STREAM_CACHE_BYTES = 20_000_000_000
"""On disk, for bytes of remote files, unless a run says otherwise."""
