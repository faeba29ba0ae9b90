//! A connection to the daemon's control socket.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use nightporter_api::{Reply, Request};

/// A connected client. One request at a time.
#[derive(Debug)]
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the daemon that listens at `path`.
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(|e| {
            let shown = path.display();
            match e.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => anyhow!(
                    "nightporterd is not running: nobody listens at {shown}\n    \
                     fix: start it (nightporterd --config FILE), or give its daemon.control with \
                     --control PATH"
                ),
                ErrorKind::PermissionDenied => anyhow!(
                    "not allowed to connect to {shown}\n    \
                     fix: run as root, or as the user that nightporterd runs as"
                ),
                _ => anyhow!("cannot connect to {shown}: {e}"),
            }
        })?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends one request and waits for its answer; an error of the daemon becomes one of ours.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Reply> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).context("the daemon has gone")?;
        line.clear();
        self.stream.read_until(b'\n', &mut line).context("the daemon has gone")?;
        if line.is_empty() {
            bail!("the daemon has gone");
        }
        match serde_json::from_slice(&line).context("not an answer of this version's daemon")? {
            Reply::Error { what, fix } => bail!("{what}\n    fix: {fix}"),
            reply => Ok(reply),
        }
    }

    /// Sends a request whose answer is a stream, and returns that.
    pub(crate) fn stream(mut self, request: &Request) -> Result<impl Read + use<>> {
        match self.ask(request)? {
            Reply::Stream {} => Ok(self.stream),
            other => bail!("not a stream but {other:?}"),
        }
    }
}
