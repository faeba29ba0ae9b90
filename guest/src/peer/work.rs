//! The execution of a peer's commands.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use crate::data::{READ_ALL, Source, splitmix64};

use super::pour::{self, Pouring};
use super::{Answer, Ask};

/// See the module above.
#[derive(Debug, Default)]
pub struct Peer {
    listener: Option<TcpListener>,
    stream: Option<TcpStream>,
    pouring: Option<Pouring>,
    source: Source,
    /// The last bytes that were read. Its memory is used again, so that page faults are no part of
    /// a transfer.
    got: Vec<u8>,
}

impl Peer {
    /// Executes a command, however long it takes.
    pub fn obey(&mut self, ask: Ask) -> Answer {
        self.work(ask).unwrap_or_else(|error| Answer::Failed {
            errno: error.raw_os_error().unwrap_or(0),
            error: error.to_string(),
        })
    }

    fn work(&mut self, ask: Ask) -> io::Result<Answer> {
        match ask {
            Ask::Listen { at } => {
                self.listener = None;
                let address = self.listener.insert(TcpListener::bind(at)?).local_addr()?;
                Ok(Answer::At { address })
            }
            Ask::Accept => {
                self.stream = None;
                let listener = self.listener.as_ref().ok_or(ErrorKind::NotConnected)?;
                let (stream, address) = listener.accept()?;
                self.keep(stream)?;
                Ok(Answer::At { address })
            }
            Ask::Connect { to } => {
                self.stream = None;
                let stream = TcpStream::connect(to)?;
                let address = stream.local_addr()?;
                self.keep(stream)?;
                Ok(Answer::At { address })
            }
            Ask::Prepare { bytes, seed } => {
                self.source.reach(seed, bytes);
                make_room(&mut self.got, bytes);
                Ok(Answer::Done { ns: 0 })
            }
            Ask::Send { bytes, seed, answered } => self.send(bytes, seed, answered),
            Ask::Receive { bytes, answered } => self.receive(bytes, answered),
            Ask::Exchange { bytes, seed, second } => self.exchange(bytes, seed, second),
            Ask::ExchangeUnevenly { bytes, seed } => self.exchange_unevenly(bytes, seed),
            Ask::Connects { to, count } => connects(to, count),
            Ask::Accepts { count } => self.accepts(count),
            Ask::Pour { bytes, seed } => {
                self.pouring = Some(Pouring::start(self.stream()?, bytes, seed)?);
                Ok(Answer::Done { ns: 0 })
            }
            Ask::Poured => {
                let pouring = self.pouring.as_mut().ok_or(ErrorKind::NotFound)?;
                Ok(Answer::Poured { bytes: pouring.written()? })
            }
            Ask::Drain { bytes, seed } => {
                let whole = pour::drain(self.stream()?, bytes, seed)?;
                self.pouring.as_mut().map_or(Ok(()), Pouring::finish)?;
                Ok(Answer::Checked { whole })
            }
            Ask::Check { seed } => {
                self.source.reach(seed, self.got.len());
                Ok(Answer::Checked { whole: self.source.piece(seed, self.got.len()) == self.got })
            }
            Ask::Ping { count } => self.ping(count),
            Ask::Pong { count } => self.pong(count),
            Ask::Finish => timed(|| self.stream()?.shutdown(Shutdown::Write)),
            Ask::ReadToEnd => {
                self.got.clear();
                let mut stream = connected(self.stream.as_ref())?;
                Ok(Answer::Ended { bytes: stream.read_to_end(&mut self.got)? })
            }
            Ask::Close => {
                self.stream = None;
                Ok(Answer::Done { ns: 0 })
            }
        }
    }

    fn stream(&self) -> io::Result<&TcpStream> {
        connected(self.stream.as_ref())
    }

    fn keep(&mut self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        self.stream = Some(stream);
        Ok(())
    }

    fn send(&mut self, bytes: usize, seed: u64, answered: bool) -> io::Result<Answer> {
        self.source.reach(seed, bytes);
        let mut stream = self.stream()?;
        timed(|| {
            stream.write_all(self.source.piece(seed, bytes))?;
            if answered { expect_answer(stream) } else { Ok(()) }
        })
    }

    fn receive(&mut self, bytes: usize, answered: bool) -> io::Result<Answer> {
        make_room(&mut self.got, bytes);
        let mut stream = connected(self.stream.as_ref())?;
        timed(|| {
            stream.read_exact(&mut self.got)?;
            if answered { stream.write_all(&[READ_ALL]) } else { Ok(()) }
        })
    }

    fn exchange(&mut self, bytes: usize, seed: u64, second: bool) -> io::Result<Answer> {
        self.source.reach(seed, bytes);
        make_room(&mut self.got, bytes);
        let mut stream = connected(self.stream.as_ref())?;
        let (piece, got) = (self.source.piece(seed, bytes), &mut self.got);
        if second {
            stream.peek(&mut [0])?;
        }
        timed(|| {
            thread::scope(|scope| {
                let mut writer = stream;
                let sending = scope.spawn(move || writer.write_all(piece));
                stream.read_exact(got)?;
                sending.join().expect("does not panic")
            })?;
            stream.write_all(&[READ_ALL])?;
            expect_answer(stream)
        })
    }

    fn exchange_unevenly(&mut self, bytes: usize, seed: u64) -> io::Result<Answer> {
        self.source.reach(seed, bytes);
        make_room(&mut self.got, bytes);
        let stream = connected(self.stream.as_ref())?;
        let (piece, got) = (self.source.piece(seed, bytes), &mut self.got);
        timed(|| {
            thread::scope(|scope| {
                let mut writer = stream;
                let sending = scope.spawn(move || {
                    let (mut rest, mut state) = (piece, seed);
                    while !rest.is_empty() {
                        let (now, later) = rest.split_at(any_size(&mut state).min(rest.len()));
                        writer.write_all(now)?;
                        rest = later;
                    }
                    Ok(())
                });
                let (mut at, mut state, mut reader) = (0, !seed, stream);
                while at < bytes {
                    let end = bytes.min(at + any_size(&mut state));
                    match reader.read(&mut got[at..end])? {
                        0 => return Err(ErrorKind::UnexpectedEof.into()),
                        count => at += count,
                    }
                }
                sending.join().expect("does not panic")
            })
        })
    }

    fn accepts(&mut self, count: usize) -> io::Result<Answer> {
        let listener = self.listener.as_ref().ok_or(ErrorKind::NotConnected)?;
        timed(|| {
            for _ in 0..count {
                let (mut stream, _) = listener.accept()?;
                let mut all = Vec::new();
                stream.read_to_end(&mut all)?;
                stream.write_all(&all)?;
            }
            Ok(())
        })
    }

    fn ping(&self, count: usize) -> io::Result<Answer> {
        let mut stream = self.stream()?;
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let begun = Instant::now();
            stream.write_all(&[READ_ALL])?;
            stream.read_exact(&mut [0])?;
            times.push(begun.elapsed());
        }
        times.sort_unstable();
        let median = times.get(count / 2).copied().unwrap_or_default();
        Ok(Answer::Done { ns: u64::try_from(median.as_nanos()).unwrap_or(u64::MAX) })
    }

    fn pong(&self, count: usize) -> io::Result<Answer> {
        let mut stream = self.stream()?;
        timed(|| {
            for _ in 0..count {
                stream.read_exact(&mut [0])?;
                stream.write_all(&[READ_ALL])?;
            }
            Ok(())
        })
    }
}

fn connects(to: SocketAddr, count: usize) -> io::Result<Answer> {
    timed(|| {
        for turn in 0..count {
            let sent = turn.to_le_bytes()[0];
            let mut stream = TcpStream::connect(to)?;
            stream.write_all(&[sent])?;
            stream.shutdown(Shutdown::Write)?;
            let mut all = Vec::new();
            stream.read_to_end(&mut all)?;
            if all != [sent] {
                return Err(io::Error::other(format!("connection {turn}: {all:?}, not {sent}")));
            }
        }
        Ok(())
    })
}

/// From 1 to 65,536 bytes, small ones as often as large ones.
fn any_size(state: &mut u64) -> usize {
    let random = splitmix64(state);
    let most = 1_u64 << (random % 17);
    usize::try_from(1 + (random >> 5) % most).expect("at most 65,536")
}

fn connected(stream: Option<&TcpStream>) -> io::Result<&TcpStream> {
    stream.ok_or_else(|| ErrorKind::NotConnected.into())
}

fn timed(work: impl FnOnce() -> io::Result<()>) -> io::Result<Answer> {
    let begun = Instant::now();
    work()?;
    Ok(Answer::Done { ns: u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX) })
}

fn expect_answer(mut stream: &TcpStream) -> io::Result<()> {
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    if answer == [READ_ALL] { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

/// Memory that was touched. Bytes that were read there before are still there, so each check uses
/// another seed.
fn make_room(got: &mut Vec<u8>, bytes: usize) {
    if got.len() != bytes {
        got.clear();
        got.resize(bytes, 0xa5);
    }
}
