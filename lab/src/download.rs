//! One timed and verified download: the guest sends, the remote measures.
//!
//! - **connect**: connect() until it returns.
//! - **acked**: from there until the remote's application has read the last byte. The request is
//!   written in between. (The name is the one that uploads have for "the sender is done".)
//! - **delivered**: the same from the *call* of connect().

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nightporter_guest::data::{self, Header, Service, Source};

use crate::transfer::{Outcome, request};

/// What guests send, made once.
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
