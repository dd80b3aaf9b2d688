"""An HTTP proxy with an allow-list, on a Unix socket. Standard library alone: it runs in its own container.

`proxy.py SOCKET HOST:PORT...` answers CONNECT and absolute-form requests to exactly the hosts and ports named, and 403
to all others. A name may not lead to an address that is not global (a loopback, private or link-local one): such an
address must be allowed as an address. Each connection carries one request.
"""

import asyncio
import ipaddress
import os
import socket
import sys
from urllib.parse import urlsplit

HEAD_LIMIT = 64 * 1024
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 120.0


class Refused(Exception):
    pass


def split_authority(authority, default_port):
    parts = urlsplit("//" + authority)
    if not parts.hostname:
        raise Refused("no host in the request")
    return parts.hostname.lower(), parts.port or default_port


def is_address(host):
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def connect(allowed, host, port):
    if (host, port) not in allowed:
        raise Refused(f"{host}:{port} is not on this sandbox's allow-list")
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [entry[4][0] for entry in found]
    if not is_address(host):
        addresses = [address for address in addresses if ipaddress.ip_address(address).is_global]
    if not addresses:
        raise Refused(f"{host} has no public address")
    return await asyncio.wait_for(asyncio.open_connection(str(addresses[0]), port), CONNECT_TIMEOUT_S)


async def pump(reader, writer):
    while data := await asyncio.wait_for(reader.read(65536), IDLE_TIMEOUT_S):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def answer(status, body):
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode("latin-1")


async def serve(reader, writer, allowed):
    upstream = None
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE_TIMEOUT_S)
        request, _, headers = head.partition(b"\r\n")
        method, target, version = request.decode("latin-1").split(" ")
        if method == "CONNECT":
            upstream_reader, upstream = await connect(allowed, *split_authority(target, 443))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            url = urlsplit(target)
            if url.scheme != "http" or not url.netloc:
                raise Refused("only CONNECT and absolute http:// requests are served")
            upstream_reader, upstream = await connect(allowed, *split_authority(url.netloc, 80))
            path = url._replace(scheme="", netloc="").geturl() or "/"
            kept = [
                line
                for line in headers.split(b"\r\n")
                if line and not line.lower().startswith((b"proxy-", b"connection:", b"keep-alive:"))
            ]
            # One request a connection: a second one would pass unchecked, since only the first head is read.
            lines = [f"{method} {path} {version}".encode("latin-1"), *kept, b"Connection: close", b"", b""]
            upstream.write(b"\r\n".join(lines))
        await asyncio.gather(pump(reader, upstream), pump(upstream_reader, writer))
    except Refused as error:
        writer.write(answer("403 Forbidden", str(error)))
    except (TimeoutError, OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
        writer.write(answer("502 Bad Gateway", type(error).__name__))
    finally:
        for end in (writer, upstream):
            if end is not None:
                end.close()


async def main(path, authorities):
    allowed = {split_authority(authority, None) for authority in authorities}
    server = await asyncio.start_unix_server(lambda r, w: serve(r, w, allowed), path, limit=HEAD_LIMIT)
    os.chmod(path, 0o666)
    print("ready")
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
