//! One timed and verified download: the guest sends, the remote measures.
//!
//! - **connect**: connect() until it returns.
//! - **acked**: from there until the remote's application has read the last byte. The request is
//!   written in between. (The name is the one that uploads have for "the sender is done".)
//! - **delivered**: the same from the *call* of connect().
//!
//! And a connection that carries as much each way at the same time ([`both`]): the upload is timed
//! as others are (`transfer`), but the guest says in a datagram that it has read everything.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nightporter_guest::data::{self, Header, READ_ALL, Service, Source, Verdict};

use crate::sys;
use crate::transfer::{Opened, Outcome, request, wait_for_ack_stamp};

/// The data that guests send, made once.
static SOURCE: Mutex<Source> = Mutex::new(Source::new());

/// Has the guest at `address` send `bytes` bytes to the calling thread's network namespace.
///
/// # Errors
/// The connection failed, or took longer than `limit` somewhere; it did not end where it had to.
///
/// # Panics
/// A download in another thread has.
pub fn download(address: Ipv4Addr, bytes: usize, seed: u64, limit: Duration) -> Result<Outcome> {
    let header = Header { service: Service::Source, bytes: bytes as u64, hash: seed };
    let mut got = vec![1; bytes]; // its pages have been touched
    let peer = SocketAddr::from((address, data::PORT));
    let start = Instant::now();
    let mut stream = TcpStream::connect_timeout(&peer, limit).context("connecting")?;
    let connect = start.elapsed();
    request(&mut stream, &header, limit)?;
    stream.read_exact(&mut got).context("receiving")?;
    let delivered = start.elapsed();
    ensure!(stream.read(&mut [0]).context("the end")? == 0, "bytes behind the last");
    let mut source = SOURCE.lock().expect("no panics under this lock");
    source.reach(seed, bytes);
    Ok(Outcome {
        connect,
        acked: delivered - connect,
        delivered,
        hash_ok: got == source.piece(seed, bytes),
        ..Outcome::default()
    })
}

/// The times of a transfer both ways, each way for itself.
#[derive(Debug, Clone, Copy)]
pub struct Both {
    /// The remote's bytes.
    pub up: Outcome,
    /// The guest's.
    pub down: Outcome,
}

/// Sends `bytes` bytes to the guest at `address` while it sends as many, over one connection of the
/// calling thread's network namespace.
///
/// # Errors
/// The connection failed, or took longer than `limit` somewhere; it did not end where it had to.
///
/// # Panics
/// A download in another thread has.
pub fn both(address: Ipv4Addr, bytes: usize, seed: u64, limit: Duration) -> Result<Both> {
    let header = Header { service: Service::Both, bytes: bytes as u64, hash: seed };
    let mut source = SOURCE.lock().expect("no panics under this lock");
    source.reach(seed, bytes);
    source.reach(header.seed_of_host(), bytes);
    let message = [&header.to_bytes(), source.piece(header.seed_of_host(), bytes)].concat();
    let mut got = vec![1; bytes]; // its pages have been touched
    let Opened { mut stream, start, connect, connected } = Opened::to(address, limit)?;
    let bell = UdpSocket::bind(stream.local_addr()?).context("a port for the guest's word")?;
    bell.set_read_timeout(Some(limit))?;
    let mut sender = stream.try_clone()?;
    let (read, delivered) = thread::scope(|scope| {
        let sending = scope.spawn(|| sender.write_all(&message));
        let hearing = scope.spawn(|| {
            let mut word = [0];
            bell.recv(&mut word).context("waiting for the guest's word")?;
            ensure!(word == [READ_ALL], "the guest's word was {word:?}");
            Ok(start.elapsed())
        });
        stream.read_exact(&mut got).context("receiving")?;
        let delivered = start.elapsed();
        sending.join().expect("does not panic").context("sending")?;
        anyhow::Ok((hearing.join().expect("does not panic")?, delivered))
    })?;
    let stamp = wait_for_ack_stamp(&stream, message.len(), limit)?;
    let verdict = Verdict::read_from(&mut stream).context("reading the verdict")?;
    ensure!(stream.read(&mut [0])? == 0, "bytes after the guest's verdict");
    let up = Outcome {
        connect,
        acked: stamp.duration_since(connected).unwrap_or_default(),
        delivered: read,
        guest_read: Duration::from_nanos(verdict.read_ns),
        guest_interrupts: verdict.interrupts,
        retransmits: sys::tcp_retransmits(&stream)?,
        hash_ok: verdict.hash_ok,
    };
    let down = Outcome {
        connect,
        acked: delivered - connect,
        delivered,
        hash_ok: got == source.piece(seed, bytes),
        ..Outcome::default()
    };
    Ok(Both { up, down })
}
