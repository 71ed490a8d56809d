"""The one place the version is written. Packaging, the CLI and the manifests read it from here."""

__version__ = "0.1.0"
