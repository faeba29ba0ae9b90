//! A connection to the daemon's control socket.

use std::error::Error;
use std::fmt;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nightporter_api::{Reply, Request};

/// How long a daemon may take to answer: a status of a million flows takes milliseconds.
const LIMIT: Duration = Duration::from_secs(5);

/// The end of an error: the daemon has done nothing for `limit`.
fn stands(limit: Duration) -> String {
    format!(
        " for {} s: nightporterd hangs\n    fix: see its log; if it does not go on, restart it",
        limit.as_secs()
    )
}

/// Connects, or fails after [`LIMIT`]: if the daemon accepts no connections and its backlog is
/// full, a connection waits for a place without end.
fn connect_in_time(path: &Path) -> io::Result<UnixStream> {
    let (to, from) = mpsc::channel();
    let path = path.to_owned();
    // std has no timeout for this; the thread ends with the process.
    thread::spawn(move || to.send(UnixStream::connect(path)));
    from.recv_timeout(LIMIT).unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

/// The daemon has done nothing: why, and the fix.
#[derive(Debug)]
pub(crate) struct Refused(String, String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n    fix: {}", self.0, self.1)
    }
}

impl Error for Refused {}

/// A connected client. One request at a time.
#[derive(Debug)]
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
    limit: Duration,
}

impl Client {
    /// Connects to the daemon that listens at `path`.
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let stream = connect_in_time(path).map_err(|e| {
            let shown = path.display();
            match e.kind() {
                ErrorKind::TimedOut => {
                    anyhow!("the connection to {shown} is not accepted{}", stands(LIMIT))
                }
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => anyhow!(
                    "nightporterd is not running: nobody listens at {shown}\n    \
                     fix: start it (nightporterd --config FILE), or give its daemon.control with \
                     --control PATH"
                ),
                ErrorKind::PermissionDenied => anyhow!(
                    "not allowed to connect to {shown}\n    \
                     fix: run as root, or as the user that nightporterd runs as; to look at \
                     states alone, be in daemon.status_group"
                ),
                _ => anyhow!("cannot connect to {shown}: {e}"),
            }
        })?;
        stream
            .set_read_timeout(Some(LIMIT))
            .and_then(|()| stream.set_write_timeout(Some(LIMIT)))?;
        Ok(Self { stream: BufReader::new(stream), limit: LIMIT })
    }

    /// Sets how long an answer may take.
    pub(crate) fn wait_for(&mut self, limit: Duration) -> Result<()> {
        self.limit = limit;
        Ok(self.stream.get_ref().set_read_timeout(Some(limit))?)
    }

    /// Sends one request and waits for its answer; an error of the daemon becomes one of ours.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Reply> {
        self.ask_as_long_as(request, || bail!("nobody asked"))
    }

    /// As [`Self::ask`], but waits longer as long as the daemon `answers` other clients.
    pub(crate) fn ask_as_long_as(
        &mut self,
        request: &Request,
        answers: impl Fn() -> Result<()>,
    ) -> Result<Reply> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        let limit = self.limit;
        let stands = |e: io::Error| match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                anyhow!("no answer{}", self::stands(limit))
            }
            _ => anyhow!("the daemon has gone: {e}"),
        };
        self.stream.get_mut().write_all(&line).map_err(stands)?;
        line.clear();
        while let Err(e) = self.stream.read_until(b'\n', &mut line) {
            let is_late = matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
            if !is_late || answers().is_err() {
                return Err(stands(e));
            }
        }
        if line.is_empty() {
            bail!("the daemon has gone");
        }
        match serde_json::from_slice(&line).context("not an answer of this version's daemon")? {
            Reply::Error { what, fix } => Err(Refused(what, fix).into()),
            reply => Ok(reply),
        }
    }

    /// The act by which a stream ends, as if the daemon had ended it.
    pub(crate) fn hang_up(&self) -> Result<impl FnOnce() + Send + use<>> {
        let stream = self.stream.get_ref().try_clone()?;
        Ok(move || drop(stream.shutdown(Shutdown::Both)))
    }

    /// Sends a request whose answer is a stream, and returns the stream.
    pub(crate) fn stream(mut self, request: &Request) -> Result<impl Read + use<>> {
        match self.ask(request)? {
            Reply::Stream {} => {
                // A quiet port or connection may send nothing for hours.
                self.stream.get_ref().set_read_timeout(None)?;
                Ok(self.stream)
            }
            other => bail!("not a stream but {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn an_answer_is_awaited_as_long_as_others_get_theirs() {
        let (ours, mut daemon) = UnixStream::pair().unwrap();
        let mut client = Client { stream: BufReader::new(ours), limit: LIMIT };
        client.wait_for(Duration::from_millis(1)).unwrap();
        let asked = Cell::new(0);
        let answers = || {
            asked.set(asked.get() + 1);
            if asked.get() == 2 {
                (&daemon).write_all(b"{\"do")?;
            } else if asked.get() == 3 {
                (&daemon).write_all(b"ne\":{}}\n")?;
            }
            Ok(())
        };
        let reply = client.ask_as_long_as(&Request::Status {}, answers).unwrap();
        assert_eq!((reply, asked.get()), (Reply::Done {}, 3));
        let said = client.ask_as_long_as(&Request::Status {}, || bail!("it hangs")).unwrap_err();
        assert!(said.to_string().starts_with("no answer for 0 s: nightporterd hangs"), "{said}");
        let mut asked = [0; 34];
        daemon.read_exact(&mut asked).unwrap();
        assert_eq!(asked, *b"{\"cmd\":\"status\"}\n{\"cmd\":\"status\"}\n");
    }
}
