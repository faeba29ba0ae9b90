//! Sessions with a member whose answers are known before they are asked for: for the fuzz target,
//! which makes them up.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use super::session::Thread;
use super::{Config, Connector, Endpoint, Etcd};
use crate::{News, Registry as _};

/// A registry without a thread: a session takes place when it is called for.
pub struct Rehearsal {
    etcd: Etcd,
    thread: Thread,
    member: Arc<Mutex<Member>>,
}

/// What the member says by its next connections, and its ends of those that there are.
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
    /// Of keys that begin so.
    ///
    /// # Errors
    /// The system's.
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

    /// To say what this host has.
    pub fn registry(&mut self) -> &mut Etcd {
        &mut self.etcd
    }

    /// A session in which the member says this by each of its connections, one after the other, and
    /// then hangs up: why it ended. Nothing is waited for. No answer may be longer than the buffer
    /// of a socket.
    pub fn session(&mut self, answers: Vec<Vec<u8>>) -> Option<String> {
        let member = Member { answers: answers.into(), ends: Vec::new() };
        *self.member.lock().unwrap_or_else(PoisonError::into_inner) = member;
        self.thread.one_session().map(|(why, _)| why)
    }

    /// What is new.
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
