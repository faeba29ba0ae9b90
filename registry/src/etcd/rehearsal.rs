//! Sessions with a member whose answers are given in advance, for the fuzz target.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use super::session::Thread;
use super::{Config, Connector, Endpoint, Etcd};
use crate::{News, Registry as _};

/// A registry without a thread: each call of `session` runs one.
pub struct Rehearsal {
    etcd: Etcd,
    thread: Thread,
    member: Arc<Mutex<Member>>,
}

/// The member's answers for its next connections, and its ends of the present ones.
#[derive(Default)]
struct Member {
    answers: VecDeque<Vec<u8>>,
    ends: Vec<UnixStream>,
}

impl Member {
    fn connect(&mut self) -> io::Result<TcpStream> {
        let answer = self.answers.pop_front().ok_or(io::ErrorKind::ConnectionRefused)?;
        let (near, mut far) = UnixStream::pair()?;
        far.set_nonblocking(true)?;
        // A session that finds an answer cut off would be taken for a finding.
        far.write_all(&answer).expect("the socket has room for an answer");
        far.shutdown(Shutdown::Write)?;
        self.ends.push(far);
        // Any stream of bytes will do.
        Ok(TcpStream::from(OwnedFd::from(near)))
    }
}

impl Rehearsal {
    /// A registry of the keys with this prefix.
    ///
    /// # Errors
    /// The system call's.
    pub fn new(prefix: &str) -> io::Result<Self> {
        let member = Arc::<Mutex<Member>>::default();
        let theirs = Arc::clone(&member);
        let connect =
            move |_: usize| theirs.lock().unwrap_or_else(PoisonError::into_inner).connect();
        let (etcd, thread) = Etcd::prepare(Config {
            members: vec![Endpoint { address: (Ipv4Addr::LOCALHOST, 2379).into(), is_tls: false }],
            connector: Connector::new(connect),
            tls: None,
            user: None,
            prefix: prefix.into(),
            ttl_s: 3600,
        })?;
        Ok(Self { etcd, thread, member })
    }

    /// The registry's interface.
    pub fn registry(&mut self) -> &mut Etcd {
        &mut self.etcd
    }

    /// Runs a session in which each connection of the member gives the next answer and then closes;
    /// returns why the session ended. The session never waits. An answer must fit into the buffer
    /// of a socket.
    pub fn session(&mut self, answers: Vec<Vec<u8>>) -> Option<String> {
        let member = Member { answers: answers.into(), ends: Vec::new() };
        *self.member.lock().unwrap_or_else(PoisonError::into_inner) = member;
        self.thread.one_session().map(|(why, _)| why)
    }

    /// The changes.
    pub fn news(&mut self) -> Vec<News> {
        let mut all = Vec::new();
        loop {
            let before = all.len();
            let gone = self.thread.exchange().is_err();
            all.extend(std::iter::from_fn(|| self.etcd.poll()));
            if gone || all.len() == before {
                return all;
            }
        }
    }
}
