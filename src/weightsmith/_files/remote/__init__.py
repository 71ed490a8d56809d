"""Files that are read where they are: on the Hub, behind https, in an object store.

addresses.py  what an address names
environment.py  variables of the environment that clients read, checked before they do
failures.py   which failures pass, for every client
retries.py    a run of bytes from a server that may fail, within a bound
http.py       one request for a run of bytes, checked
stores.py     the same of S3, GCS and Azure, by the package obstore
files.py      a file elsewhere as sources read it
ahead.py      what a plan will read, fetched before it is read, in large requests, several at a time
spool.py      where bytes wait: those that were fetched, and those that `outputs.bucket` uploads
folder.py     a model's folder behind https or in an object store

The Hub itself is in `weightsmith._files.hub`, which uses these.
"""

STREAM_CACHE_BYTES = 20_000_000_000
"""On disk, for bytes of remote files, unless a run says otherwise."""
