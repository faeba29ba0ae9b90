//! Connections to a registry. The daemon makes no TCP sockets. Another small process does, which
//! has no capability, opens no file and knows only the members that were configured at the start.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::process::exit;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::libc;
use nix::sys::prctl::{set_name, set_pdeathsig};
use nix::sys::signal::Signal;
use rustix::net::sockopt;

use super::ANSWER_MAX;
use super::shut::shut_connector;
use super::words::{Channel, Given, Refusal};
use crate::errors::{StartError, error};
use crate::sys;

/// How long a member may take.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// A peer that is silent for so long gets keepalive probes, so often, so many times (tcp(7)).
const SILENT_FOR: Duration = Duration::from_secs(3);
const ASK_EVERY: Duration = Duration::from_secs(1);
const ASK_TIMES: u32 = 3;

/// The daemon's side.
#[derive(Clone, Debug)]
pub struct Connector(Arc<Mutex<Channel>>);

impl Connector {
    /// Starts the process, for these members. To be called while there is one thread, and before
    /// the broker is started, whose channel it would have.
    ///
    /// # Errors
    /// The system's.
    pub fn start(members: &[SocketAddr]) -> Result<Self, StartError> {
        let failed = |e: io::Error| {
            let what = format!("cannot start the process that connects to the registry: {e}");
            error(what, "report this")
        };
        let (ours, theirs) = Channel::pair(ANSWER_MAX).map_err(failed)?;
        if sys::split().map_err(failed)? {
            drop(ours);
            run(members, &theirs);
        }
        drop(theirs);
        match ours.hear().map_err(failed)? {
            Ok(_) => Ok(Self::of(ours)),
            Err(no) => Err(error(no.what, &no.fix)),
        }
    }

    /// Of a process that answers by the other end.
    pub(super) fn of(channel: Channel) -> Self {
        Self(Arc::new(Mutex::new(channel)))
    }

    /// A connection to the member with this place in the list; waits for a second at most. It sends
    /// without delay, and asks whether a silent peer lives.
    ///
    /// # Errors
    /// As of connect(2); there is no such member; the process has ended, or does not answer.
    pub fn connect(&self, member: usize) -> io::Result<TcpStream> {
        let place = u8::try_from(member).map_err(|_| ErrorKind::NotFound)?;
        let channel = self.0.lock().unwrap_or_else(|poisoned| {
            // A mistake of ours between a request and its answer, which was not read.
            poisoned.get_ref().end();
            poisoned.into_inner()
        });
        channel.send(&[place], &[])?;
        match channel.hear()? {
            Ok(Some(Given { fd, .. })) => Ok(fd.into()),
            Ok(None) => Err(ErrorKind::NotFound.into()),
            Err(Refusal { what, .. }) => Err(what
                .parse()
                .map_or_else(|_| io::Error::other(what), io::Error::from_raw_os_error)),
        }
    }
}

/// Until the daemon ends.
fn run(members: &[SocketAddr], daemon: &Channel) -> ! {
    let _ = set_name(c"np-registry"); // for `ps`
    // If it has ended already, its end of the channel has.
    let _ = set_pdeathsig(Signal::SIGKILL);
    let ready = shut_connector(members).map(|()| None).map_err(Refusal::from);
    if daemon.say(&ready).is_ok() && ready.is_ok() {
        while serve(members, daemon).is_ok() {}
    }
    exit(0);
}

/// Answers the next request. Errors: the daemon is gone.
fn serve(members: &[SocketAddr], daemon: &Channel) -> io::Result<()> {
    let mut place = [0];
    daemon.recv(&mut place)?;
    let answer = members.get(usize::from(place[0])).map(|member| connect(*member)).transpose();
    let given = |socket: TcpStream| Given { fd: socket.into(), more: Vec::new(), index: 0 };
    daemon.say(&answer.map(|socket| socket.map(given)).map_err(|e| {
        let none = if e.kind() == ErrorKind::TimedOut { libc::ETIMEDOUT } else { libc::EIO };
        Refusal { what: e.raw_os_error().unwrap_or(none).to_string(), ..Refusal::default() }
    }))
}

fn connect(member: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpStream::connect_timeout(&member, CONNECT_MAX)?;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, SILENT_FOR)?;
    sockopt::set_tcp_keepintvl(&socket, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(&socket, ASK_TIMES)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_connection_is_to_a_member_and_comes_with_its_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (ours, theirs) = Channel::pair(ANSWER_MAX).unwrap();
        let process = thread::spawn(move || while serve(&[here, nowhere], &theirs).is_ok() {});
        let connector = Connector::of(ours);
        let socket = connector.connect(0).unwrap();
        let (_, from) = listener.accept().unwrap();
        assert_eq!((socket.peer_addr().unwrap(), socket.local_addr().unwrap()), (here, from));
        let kind = |member| connector.connect(member).unwrap_err().kind();
        assert_eq!(kind(1), ErrorKind::ConnectionRefused);
        assert_eq!((kind(2), kind(256)), (ErrorKind::NotFound, ErrorKind::NotFound));
        drop(connector);
        process.join().unwrap();
    }
}
