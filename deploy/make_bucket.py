"""Make a bucket if it is not there: ``python make_bucket.py NAME``; end point and keys from the AWS variables."""

from __future__ import annotations

import os
import sys

from pyarrow.fs import FileType, S3FileSystem


def main(name: str) -> int:
    """Create the bucket ``name`` on the S3 server of the environment; the exit status."""
    scheme, _, host = os.environ["AWS_ENDPOINT_URL"].partition("://")
    server = S3FileSystem(
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region=os.environ.get("AWS_REGION", "us-east-1"),
        endpoint_override=host,
        scheme=scheme,
        allow_bucket_creation=True,
    )
    if server.get_file_info(name).type == FileType.NotFound:
        server.create_dir(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
