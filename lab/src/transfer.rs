//! One timed and verified upload, on the sender's clock.
//!
//! - **connect**: connect() until it returns.
//! - **acked**: from there until the sender's kernel has the ACK for the last byte written. The
//!   kernel stamps that moment itself (SO_TIMESTAMPING with TX_ACK), so nobody polls and the
//!   measurement costs the sender's core nothing.
//! - **delivered**: from the *call* of connect() until the sender reads the one byte with which
//!   the receiving application says that it has read everything (`nightporter_guest::data`). It
//!   holds one trip back from the guest, 0.1 ms or so, the same on every path. The guest hashes
//!   after that byte.

use std::io::{IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::data::{self, Header, READ_ALL, Service, Verdict};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrIn, TimestampingFlag, Timestamps, recvmsg, setsockopt,
    sockopt,
};

/// What one upload took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// connect() until it returned.
    pub connect: Duration,
    /// From connect()'s return until everything written was acknowledged.
    pub acked: Duration,
    /// From connect()'s call until the receiving application had read everything.
    pub delivered: Duration,
    /// From accept() in the guest until its application had read everything, by its clock.
    pub guest_read: Duration,
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

    /// Sends it to the guest at `address`, from the calling thread's network namespace.
    ///
    /// # Errors
    /// The connection failed, or took longer than `limit` somewhere.
    pub fn send(&self, address: Ipv4Addr, limit: Duration) -> Result<Outcome> {
        let peer = SocketAddr::from((address, data::PORT));
        let start = Instant::now();
        let mut stream = TcpStream::connect_timeout(&peer, limit).context("connecting")?;
        let connect = start.elapsed();
        let connected = SystemTime::now(); // the clock of the kernel's packet timestamps
        stream.set_write_timeout(Some(limit))?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        ask_for_ack_stamp(&stream)?;
        stream.write_all(&self.message).context("sending")?;
        let last_byte = u32::try_from(self.message.len() - 1).context("a message below 4 GiB")?;
        let (acked_at, delivered) = wait_for_both(&mut stream, last_byte, start, limit)?;
        let acked = acked_at.duration_since(connected).unwrap_or_default();
        let verdict = Verdict::read_from(&mut stream).context("reading the guest's verdict")?;
        ensure!(stream.read(&mut [0])? == 0, "bytes after the guest's verdict");
        let hash_ok = verdict.hash_ok && verdict.hash == self.hash;
        let guest_read = Duration::from_nanos(verdict.read_ns);
        Ok(Outcome { connect, acked, delivered, guest_read, hash_ok })
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

/// Waits for the ACK of `last_byte` and for the guest's READ_ALL, in whatever order they come.
/// The time of the first, and how long after `start` the second came.
fn wait_for_both(
    stream: &mut TcpStream,
    last_byte: u32,
    start: Instant,
    limit: Duration,
) -> Result<(SystemTime, Duration)> {
    let deadline = Instant::now() + limit;
    let (mut acked_at, mut delivered) = (None, None);
    loop {
        if let (Some(acked_at), Some(delivered)) = (acked_at, delivered) {
            return Ok((acked_at, delivered));
        }
        // The verdict follows READ_ALL; until the stamp has come it must not wake us.
        let wanted = if delivered.is_none() { PollFlags::POLLIN } else { PollFlags::empty() };
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).context("a limit below weeks")?;
        let mut fds = [PollFd::new(stream.as_fd(), wanted)];
        if poll(&mut fds, timeout)? == 0 {
            bail!("acked: {}, read: {} after {limit:?}", acked_at.is_some(), delivered.is_some());
        }
        let events = fds[0].revents().unwrap_or(PollFlags::empty());
        if events.contains(PollFlags::POLLERR) {
            acked_at = acked_at.or(ack_stamp(stream, last_byte)?);
        }
        if events.contains(PollFlags::POLLIN) && delivered.is_none() {
            let now = start.elapsed();
            let mut byte = [0];
            stream.read_exact(&mut byte).context("reading the guest's answer")?;
            ensure!(byte[0] == READ_ALL, "the guest answered {byte:?}");
            delivered = Some(now);
        }
    }
}

/// Takes one message from the socket's error queue: when `last_byte` was acknowledged, or `None`
/// for the stamp of an earlier byte.
fn ack_stamp(stream: &TcpStream, last_byte: u32) -> Result<Option<SystemTime>> {
    let mut space = nix::cmsg_space!(Timestamps, libc::sock_extended_err, libc::sockaddr_in);
    let mut nothing = [0; 1];
    let mut iov = [IoSliceMut::new(&mut nothing)];
    let flags = MsgFlags::MSG_ERRQUEUE;
    let message = recvmsg::<SockaddrIn>(stream.as_raw_fd(), &mut iov, Some(&mut space), flags)
        .context("the connection failed")?;
    let (mut stamp, mut byte) = (None, None);
    for part in message.cmsgs()? {
        match part {
            ControlMessageOwned::ScmTimestampsns(stamps) => {
                stamp = Some(UNIX_EPOCH + Duration::from(stamps.system));
            }
            ControlMessageOwned::Ipv4RecvErr(error, _) => byte = Some(error.ee_data),
            _ => {}
        }
    }
    Ok(stamp.filter(|_| byte == Some(last_byte)))
}
