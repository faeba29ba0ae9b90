//! One timed and verified upload, on the sender's clock.
//!
//! - **connect**: connect() until it returns.
//! - **acked**: from there until the sender's kernel has the ACK for the last byte written. The
//!   kernel itself stamps that moment (SO_TIMESTAMPING with TX_ACK), so nothing polls and the
//!   measurement costs the sender's core nothing.
//! - **delivered**: from the *call* of connect() until the sender reads the one byte that the
//!   receiving application writes when it has read everything (`nightporter_guest::data`). It
//!   includes one trip back from the guest, 0.1 ms or so, the same on every path. The guest hashes
//!   after that byte.

use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::data::{self, Header, READ_ALL, Service, Source, Verdict};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, TimestampingFlag, Timestamps, recvmsg,
    setsockopt, sockopt,
};

use crate::sys;

/// The times of one upload.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outcome {
    /// connect() until it returned.
    pub connect: Duration,
    /// From connect()'s return until everything written was acknowledged.
    pub acked: Duration,
    /// From connect()'s call until the receiving application had read everything.
    pub delivered: Duration,
    /// From accept() in the guest until its application had read everything, by its clock.
    pub guest_read: Duration,
    /// Interrupts of the guest's NICs from its boot until it had read and hashed everything.
    pub guest_interrupts: u64,
    /// Segments the sender retransmitted.
    pub retransmits: u32,
    /// The receiver found the bytes to be those sent.
    pub hash_ok: bool,
}

/// A message ready to be sent: header and payload.
#[derive(Debug)]
pub struct Upload {
    message: Vec<u8>,
    hash: u64,
}

impl Upload {
    /// Prepares `bytes` bytes on the wire (header included), different for every `seed`.
    ///
    /// # Panics
    /// When `bytes` is below the header's length.
    #[must_use]
    pub fn new(bytes: usize, seed: u64) -> Self {
        let mut message = vec![0; bytes];
        let payload = &mut message[Header::LEN..];
        data::fill(seed, payload);
        let hash = data::hash(payload);
        let header = Header { service: Service::Sink, bytes: payload.len() as u64, hash };
        message[..Header::LEN].copy_from_slice(&header.to_bytes());
        Self { message, hash }
    }

    /// Sends it to the guest at `address`, from the calling thread's network namespace, and waits
    /// for the verdict.
    ///
    /// # Errors
    /// The connection failed, or took longer than `limit` somewhere.
    pub fn send(&self, address: impl Into<IpAddr>, limit: Duration) -> Result<Outcome> {
        let mut sending = self.connect(address, limit)?;
        sending.write()?;
        sending.finish()
    }

    /// Connects only.
    ///
    /// # Errors
    /// The connection failed, or took longer than `limit`.
    pub fn connect(&self, address: impl Into<IpAddr>, limit: Duration) -> Result<Sending<'_>> {
        let Opened { stream, start, connect, connected } = Opened::to(address, limit)?;
        let upload = self;
        Ok(Sending { upload, stream, limit, start, connect, connected, acked: None, read: None })
    }
}

/// A connection to the guest's service whose sender wants to know when its last byte is
/// acknowledged.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) stream: TcpStream,
    /// The call of connect(), and how long it took.
    pub(crate) start: Instant,
    pub(crate) connect: Duration,
    /// Its return, on the clock of the kernel's packet timestamps.
    pub(crate) connected: SystemTime,
}

impl Opened {
    /// Opens it.
    ///
    /// # Errors
    /// It failed, or took longer than `limit`.
    pub(crate) fn to(address: impl Into<IpAddr>, limit: Duration) -> Result<Self> {
        let peer = SocketAddr::from((address.into(), data::PORT));
        let start = Instant::now();
        let stream = TcpStream::connect_timeout(&peer, limit).context("connecting")?;
        let connect = start.elapsed();
        let connected = SystemTime::now();
        stream.set_write_timeout(Some(limit))?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        ask_for_ack_stamp(&stream)?;
        Ok(Self { stream, start, connect, connected })
    }
}

/// An upload under way.
#[derive(Debug)]
pub struct Sending<'a> {
    upload: &'a Upload,
    stream: TcpStream,
    limit: Duration,
    start: Instant,
    connect: Duration,
    connected: SystemTime,
    /// From connect()'s return to the ACK of the last byte, once it has come.
    acked: Option<Duration>,
    /// From connect()'s call to READ_ALL, once it has come.
    read: Option<Duration>,
}

impl Sending<'_> {
    /// Writes the whole message. Blocks while the socket's send buffer is full.
    ///
    /// # Errors
    /// The connection failed, or did not move for the limit.
    pub fn write(&mut self) -> Result<()> {
        self.stream.write_all(&self.upload.message).context("sending")
    }

    /// Waits until everything written is acknowledged.
    ///
    /// # Errors
    /// The connection failed, or the limit passed.
    pub fn wait_acked(&mut self) -> Result<Duration> {
        let deadline = Instant::now() + self.limit;
        loop {
            match self.acked {
                Some(acked) => return Ok(acked),
                None => self.wait_for_event(deadline)?,
            }
        }
    }

    /// Waits for the ACK, the receiving application and its verdict.
    ///
    /// # Errors
    /// The connection failed, or the limit passed.
    pub fn finish(mut self) -> Result<Outcome> {
        let deadline = Instant::now() + self.limit;
        let (acked, delivered) = loop {
            match (self.acked, self.read) {
                (Some(acked), Some(read)) => break (acked, read),
                _ => self.wait_for_event(deadline)?,
            }
        };
        let verdict = Verdict::read_from(&mut self.stream).context("reading the verdict")?;
        ensure!(self.stream.read(&mut [0])? == 0, "bytes after the guest's verdict");
        Ok(Outcome {
            connect: self.connect,
            acked,
            delivered,
            guest_read: Duration::from_nanos(verdict.read_ns),
            guest_interrupts: verdict.interrupts,
            retransmits: sys::tcp_retransmits(&self.stream)?,
            hash_ok: verdict.hash_ok && verdict.hash == self.upload.hash,
        })
    }

    /// Waits for the guest to say or end something it must not: how the connection ends.
    ///
    /// # Errors
    /// It ended well, or the guest said something.
    pub fn wait_failed(mut self) -> Result<ErrorKind> {
        match self.stream.read(&mut [0]) {
            Err(error) => Ok(error.kind()),
            Ok(read) => bail!("the connection did not fail: {read} bytes came"),
        }
    }

    /// Waits for the ACK's stamp or the guest's READ_ALL, whichever comes first.
    fn wait_for_event(&mut self, deadline: Instant) -> Result<()> {
        // The verdict follows READ_ALL; until the stamp has come it must not wake us.
        let wanted = if self.read.is_none() { PollFlags::POLLIN } else { PollFlags::empty() };
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).context("a limit below weeks")?;
        let mut fds = [PollFd::new(self.stream.as_fd(), wanted)];
        if poll(&mut fds, timeout)? == 0 {
            bail!("acked: {:?}, read: {:?} after {:?}", self.acked, self.read, self.limit);
        }
        let events = fds[0].revents().unwrap_or(PollFlags::empty());
        if events.contains(PollFlags::POLLERR) {
            // Either the stamp waits in the error queue, or the connection has ended.
            self.stream.take_error()?.map_or(Ok(()), Err).context("the connection failed")?;
            let last_byte = u32::try_from(self.upload.message.len() - 1)?;
            let stamp = ack_stamp(&self.stream, last_byte)?;
            self.acked = stamp.map(|at| at.duration_since(self.connected).unwrap_or_default());
        }
        if events.contains(PollFlags::POLLIN) && self.read.is_none() {
            let now = self.start.elapsed();
            let mut byte = [0];
            self.stream.read_exact(&mut byte).context("reading the guest's answer")?;
            ensure!(byte[0] == READ_ALL, "the guest answered {byte:?}");
            self.read = Some(now);
        }
        Ok(())
    }
}

/// Lets the guest send `bytes` bytes and checks that they are what `seed` makes. Returns the time
/// until all were read.
///
/// # Errors
/// The connection failed or was slower than `limit`, or something else came.
pub fn fetch(address: Ipv4Addr, bytes: usize, seed: u64, limit: Duration) -> Result<Duration> {
    let header = Header { service: Service::Source, bytes: bytes as u64, hash: seed };
    let start = Instant::now();
    let mut stream = open(address, &header, limit)?;
    let mut got = Vec::with_capacity(bytes);
    stream.read_to_end(&mut got).context("receiving")?;
    let took = start.elapsed();
    let mut source = Source::new();
    source.reach(seed, bytes);
    ensure!(
        got == source.piece(seed, bytes),
        "{} bytes came, and not the {bytes} asked for",
        got.len()
    );
    Ok(took)
}

/// Sends `bytes` bytes and checks that the same come back, both directions at once.
///
/// # Errors
/// The connection failed or was slower than `limit`, or something else came.
pub fn echo(address: Ipv4Addr, bytes: usize, seed: u64, limit: Duration) -> Result<()> {
    let header = Header { service: Service::Echo, bytes: bytes as u64, hash: 0 };
    let mut stream = open(address, &header, limit)?;
    let mut payload = vec![0; bytes];
    data::fill(seed, &mut payload);
    let mut sender = stream.try_clone()?;
    let mut got = Vec::with_capacity(bytes);
    thread::scope(|scope| {
        let sending = scope.spawn(|| sender.write_all(&payload));
        stream.read_to_end(&mut got).context("receiving")?;
        sending.join().expect("does not panic").context("sending")
    })?;
    ensure!(got == payload, "{} bytes came back, and not the {bytes} sent", got.len());
    Ok(())
}

fn open(address: Ipv4Addr, header: &Header, limit: Duration) -> Result<TcpStream> {
    let peer = SocketAddr::from((address, data::PORT));
    let mut stream = TcpStream::connect_timeout(&peer, limit).context("connecting")?;
    request(&mut stream, header, limit)?;
    Ok(stream)
}

/// Sends the purpose of the connection.
pub(crate) fn request(stream: &mut TcpStream, header: &Header, limit: Duration) -> Result<()> {
    stream.set_write_timeout(Some(limit))?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(&header.to_bytes()).context("sending")?;
    if header.service == Service::Source {
        stream.shutdown(Shutdown::Write)?;
    }
    Ok(())
}

/// Waits for the stamp of the last of `bytes` bytes that were sent.
///
/// # Errors
/// The connection failed, or the limit passed.
pub(crate) fn wait_for_ack_stamp(
    stream: &TcpStream,
    bytes: usize,
    limit: Duration,
) -> Result<SystemTime> {
    let last_byte = u32::try_from(bytes - 1)?;
    let deadline = Instant::now() + limit;
    loop {
        let left = PollTimeout::try_from(deadline.saturating_duration_since(Instant::now()))?;
        // An error queue that is not empty is always reported.
        ensure!(
            poll(&mut [PollFd::new(stream.as_fd(), PollFlags::empty())], left)? > 0,
            "what was sent is not acknowledged after {limit:?}"
        );
        if let Some(stamp) = ack_stamp(stream, last_byte)? {
            return Ok(stamp);
        }
    }
}

/// Makes the kernel put a timestamp into the socket's error queue when the last byte of a send()
/// is acknowledged, with that byte's offset. (Linux Documentation/networking/timestamping.rst.)
fn ask_for_ack_stamp(stream: &TcpStream) -> Result<()> {
    let flags = TimestampingFlag::from_bits_retain(libc::SOF_TIMESTAMPING_TX_ACK)
        | TimestampingFlag::SOF_TIMESTAMPING_SOFTWARE
        | TimestampingFlag::SOF_TIMESTAMPING_OPT_ID
        | TimestampingFlag::SOF_TIMESTAMPING_OPT_TSONLY;
    setsockopt(stream, sockopt::Timestamping, &flags).context("asking for ACK timestamps")
}

/// Takes one message from the socket's error queue: when `last_byte` was acknowledged, or `None`
/// for the stamp of an earlier byte.
fn ack_stamp(stream: &TcpStream, last_byte: u32) -> Result<Option<SystemTime>> {
    let mut space = nix::cmsg_space!(Timestamps, libc::sock_extended_err, libc::sockaddr_in6);
    let mut nothing = [0; 1];
    let mut iov = [IoSliceMut::new(&mut nothing)];
    let flags = MsgFlags::MSG_ERRQUEUE;
    let message = recvmsg::<SockaddrStorage>(stream.as_raw_fd(), &mut iov, Some(&mut space), flags)
        .context("the connection failed")?;
    let (mut stamp, mut byte) = (None, None);
    for part in message.cmsgs()? {
        match part {
            ControlMessageOwned::ScmTimestampsns(stamps) => {
                stamp = Some(UNIX_EPOCH + Duration::from(stamps.system));
            }
            ControlMessageOwned::Ipv4RecvErr(error, _)
            | ControlMessageOwned::Ipv6RecvErr(error, _) => byte = Some(error.ee_data),
            _ => {}
        }
    }
    Ok(stamp.filter(|_| byte == Some(last_byte)))
}
