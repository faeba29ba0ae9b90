//! Files and scripts of guests that run programs of Debian.

/// Bytes that each script of Python sends each way at least.
pub(super) const ECHOED: u64 = 8 * 1_000_000;

/// The options of `ssh`.
pub(super) const SSH: &str = "-i /srv/key -o StrictHostKeyChecking=no \
     -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR";

/// Files that packages make when they are installed, and data that programs send.
pub(super) const PREPARE: &str = "
chmod 0755 /tmp/listens
mkdir -p /srv/.ssh /run/sshd /dev/shm /var/log/nginx /var/lib/nginx
chmod 0700 /srv /srv/.ssh
ssh-keygen -q -t ed25519 -N '' -f /srv/host_key
ssh-keygen -q -t ed25519 -N '' -f /srv/key
head -c 20000000 /dev/urandom > /tmp/file
head -c 1000 /dev/urandom > /tmp/small
";

/// Whether a TCP port has a listener, at once or within ten seconds.
const LISTENS: &str = r#"#!/bin/sh
port=$(printf ':%04X' "$1")
turn=0
while [ $turn -lt 200 ]; do
    cat /proc/net/tcp* > /tmp/tcp
    while read -r _ local _ state _; do
        case "$local/$state" in *$port/0A) exit 0 ;; esac
    done < /tmp/tcp
    turn=$((turn + 1))
    sleep 0.05
done
echo "nobody listens at port $1"
exit 1
"#;

const PASSWD: &str = "root:x:0:0:root:/srv:/bin/sh
sshd:x:100:65534::/run/sshd:/bin/false
www-data:x:33:33::/var/www:/bin/false
nobody:x:65534:65534::/:/bin/false
";

const GROUP: &str = "root:x:0:
www-data:x:33:
nogroup:x:65534:
";

const NGINX: &str = "daemon off;
worker_processes 2;
error_log stderr;
pid /tmp/nginx.pid;
events { worker_connections 200; }
http {
    access_log off;
    sendfile on;
    server { listen 80; root /tmp; }
}
";

const REDIS: &str = "bind 0.0.0.0
protected-mode no
save \"\"
";

const SSHD: &str = "HostKey /srv/host_key
UsePAM no
PasswordAuthentication no
AuthorizedKeysFile /srv/.ssh/authorized_keys
";

/// An echo of all sizes of pieces, by a blocking socket.
const BLOCKING: &str = r#"
import hashlib, random, socket, sys, threading
if sys.argv[1] == 'serve':
    server = socket.create_server(('', 8001))
    while True:
        client, _ = server.accept()
        while True:
            got = client.recv(random.randrange(1, 100000))
            if not got: break
            client.sendall(got)
        client.close()
data = random.randbytes(8000000)
s = socket.create_connection((sys.argv[1], 8001))
def send():
    at = 0
    while at < len(data):
        size = random.randrange(1, 100000)
        s.sendall(data[at:at + size])
        at += size
    s.shutdown(socket.SHUT_WR)
sender = threading.Thread(target=send)
sender.start()
got = hashlib.sha256()
while True:
    piece = s.recv(random.randrange(1, 100000))
    if not piece: break
    got.update(piece)
sender.join()
assert got.digest() == hashlib.sha256(data).digest()
print('whole')
"#;

/// Eight connections at once, by asyncio.
const STREAMS: &str = r#"
import asyncio, hashlib, random, sys
async def echo(reader, writer):
    while True:
        got = await reader.read(65536)
        if not got: break
        writer.write(got)
        await writer.drain()
    writer.close()
async def serve():
    server = await asyncio.start_server(echo, '0.0.0.0', 8002)
    await server.serve_forever()
async def send(writer, data):
    writer.write(data)
    await writer.drain()
    writer.write_eof()
async def one():
    data = random.randbytes(1000000)
    reader, writer = await asyncio.open_connection(sys.argv[1], 8002)
    got = (await asyncio.gather(send(writer, data), reader.read()))[1]
    writer.close()
    await writer.wait_closed()
    assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()
async def connect():
    await asyncio.gather(*(one() for _ in range(8)))
    print('whole')
asyncio.run(serve() if sys.argv[1] == 'serve' else connect())
"#;

/// Two processes of MPI send each other messages of all sizes, at the same time.
const MPI: &str = r#"
import ctypes, random
mpi = ctypes.CDLL('libmpi.so.40', mode=ctypes.RTLD_GLOBAL)
handle = lambda name: ctypes.byref(ctypes.c_char.in_dll(mpi, name))
byte, world = handle('ompi_mpi_byte'), handle('ompi_mpi_comm_world')
assert mpi.MPI_Init(None, None) == 0
rank = ctypes.c_int()
assert mpi.MPI_Comm_rank(world, ctypes.byref(rank)) == 0
rank, other = rank.value, 1 - rank.value
for turn, size in enumerate([0, 1, 100, 4096, 65536, 1000000, 3000000, 4000000] * 2):
    data = [random.Random(2 * turn + who).randbytes(size) for who in range(2)]
    got = ctypes.create_string_buffer(size + 1)
    assert mpi.MPI_Sendrecv(data[rank], size, byte, other, turn, got, size, byte, other, turn,
                            world, None) == 0
    assert got.raw[:size] == data[other], (turn, size)
assert mpi.MPI_Finalize() == 0
print('whole')
"#;

/// The files that all guests have.
pub(super) const FILES: [(&str, &str); 9] = [
    ("/tmp/listens", LISTENS),
    ("/etc/passwd", PASSWD),
    ("/etc/group", GROUP),
    ("/tmp/nginx.conf", NGINX),
    ("/tmp/redis.conf", REDIS),
    ("/tmp/sshd_config", SSHD),
    ("/tmp/blocking.py", BLOCKING),
    ("/tmp/streams.py", STREAMS),
    ("/tmp/mpi.py", MPI),
];
