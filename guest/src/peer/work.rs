//! What a peer does.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use crate::data::{READ_ALL, Source};

use super::{Ask, Told};

/// See the module above.
#[derive(Debug, Default)]
pub struct Peer {
    listener: Option<TcpListener>,
    stream: Option<TcpStream>,
    source: Source,
    /// What was read last. Its memory is used again, so that page faults are no part of a transfer.
    got: Vec<u8>,
}

impl Peer {
    /// Does what is asked, however long it takes.
    pub fn obey(&mut self, ask: Ask) -> Told {
        self.work(ask).unwrap_or_else(|error| Told::Failed {
            errno: error.raw_os_error().unwrap_or(0),
            error: error.to_string(),
        })
    }

    fn work(&mut self, ask: Ask) -> io::Result<Told> {
        match ask {
            Ask::Listen { at } => {
                self.listener = None;
                let address = self.listener.insert(TcpListener::bind(at)?).local_addr()?;
                Ok(Told::At { address })
            }
            Ask::Accept => {
                self.stream = None;
                let listener = self.listener.as_ref().ok_or(ErrorKind::NotConnected)?;
                let (stream, address) = listener.accept()?;
                self.keep(stream)?;
                Ok(Told::At { address })
            }
            Ask::Connect { to } => {
                self.stream = None;
                let stream = TcpStream::connect(to)?;
                let address = stream.local_addr()?;
                self.keep(stream)?;
                Ok(Told::At { address })
            }
            Ask::Prepare { bytes, seed } => {
                self.source.reach(seed, bytes);
                make_room(&mut self.got, bytes);
                Ok(Told::Done { ns: 0 })
            }
            Ask::Send { bytes, seed, answered } => self.send(bytes, seed, answered),
            Ask::Receive { bytes, answered } => self.receive(bytes, answered),
            Ask::Exchange { bytes, seed, second } => self.exchange(bytes, seed, second),
            Ask::Check { seed } => {
                self.source.reach(seed, self.got.len());
                Ok(Told::Checked { whole: self.source.piece(seed, self.got.len()) == self.got })
            }
            Ask::Ping { count } => self.ping(count),
            Ask::Pong { count } => self.pong(count),
            Ask::Finish => timed(|| self.stream()?.shutdown(Shutdown::Write)),
            Ask::ReadToEnd => {
                self.got.clear();
                let mut stream = connected(self.stream.as_ref())?;
                Ok(Told::Ended { bytes: stream.read_to_end(&mut self.got)? })
            }
            Ask::Close => {
                self.stream = None;
                Ok(Told::Done { ns: 0 })
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

    fn send(&mut self, bytes: usize, seed: u64, answered: bool) -> io::Result<Told> {
        self.source.reach(seed, bytes);
        let mut stream = self.stream()?;
        timed(|| {
            stream.write_all(self.source.piece(seed, bytes))?;
            if answered { expect_answer(stream) } else { Ok(()) }
        })
    }

    fn receive(&mut self, bytes: usize, answered: bool) -> io::Result<Told> {
        make_room(&mut self.got, bytes);
        let mut stream = connected(self.stream.as_ref())?;
        timed(|| {
            stream.read_exact(&mut self.got)?;
            if answered { stream.write_all(&[READ_ALL]) } else { Ok(()) }
        })
    }

    fn exchange(&mut self, bytes: usize, seed: u64, second: bool) -> io::Result<Told> {
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

    fn ping(&self, count: usize) -> io::Result<Told> {
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
        Ok(Told::Done { ns: u64::try_from(median.as_nanos()).unwrap_or(u64::MAX) })
    }

    fn pong(&self, count: usize) -> io::Result<Told> {
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

fn connected(stream: Option<&TcpStream>) -> io::Result<&TcpStream> {
    stream.ok_or_else(|| ErrorKind::NotConnected.into())
}

fn timed(work: impl FnOnce() -> io::Result<()>) -> io::Result<Told> {
    let begun = Instant::now();
    work()?;
    Ok(Told::Done { ns: u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX) })
}

fn expect_answer(mut stream: &TcpStream) -> io::Result<()> {
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    if answer == [READ_ALL] { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

/// Memory that was touched. What was read there before is still there: who checks asks for another
/// seed each time.
fn make_room(got: &mut Vec<u8>, bytes: usize) {
    if got.len() != bytes {
        got.clear();
        got.resize(bytes, 0xa5);
    }
}
