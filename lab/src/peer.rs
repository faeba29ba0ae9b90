//! Ends of connections in guests: programs that make sockets over TCP or over their host, and use
//! them as they are told (`nightporter_guest::peer`).

use std::time::Duration;

use anyhow::{Context, Result, bail};
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::peer::{Answer, Ask};

use crate::guest::REPLY_LIMIT;
use crate::image::{PEER, TOE_LIBRARY};
use crate::vmm::Guest;

/// The kind of a peer's sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sockets {
    /// The guest's own.
    Native,
    /// The virtual TOE's, where it applies.
    Toe,
}

impl Sockets {
    fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Toe => "toe",
        }
    }

    /// A program's environment for it.
    pub(crate) fn environment(self, logs: bool) -> Vec<(String, String)> {
        let mut all = Vec::new();
        let mut add = |name: &str, value: &str| all.push((name.to_owned(), value.to_owned()));
        if self == Self::Toe {
            add("LD_PRELOAD", TOE_LIBRARY);
            if logs {
                add("NIGHTPORTER_TOE_LOG", "1");
            }
        }
        all
    }
}

impl Guest {
    /// Starts a peer, instead of the one that there was. With `logs` its library says on the
    /// console what it decides.
    ///
    /// # Errors
    /// Those of [`Guest::call`].
    pub fn start_peer(&mut self, sockets: Sockets, logs: bool) -> Result<()> {
        let (name, program) = (sockets.name().to_owned(), PEER.to_owned());
        let environment = sockets.environment(logs);
        match self.call(&Command::Start { name, program, arguments: Vec::new(), environment })? {
            Reply::Ok => Ok(()),
            other => bail!("start was answered with {other:?}"),
        }
    }

    /// Asks a peer, whose answer is waited for later.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn tell_peer(&mut self, sockets: Sockets, ask: Ask) -> Result<()> {
        let line = serde_json::to_string(&ask)?;
        self.send(&Command::Say { name: sockets.name().to_owned(), line })
    }

    /// Waits for the answer of the peer that was asked.
    ///
    /// # Errors
    /// Those of [`Guest::hear`].
    pub fn hear_peer(&mut self) -> Result<Answer> {
        self.hear_peer_within(REPLY_LIMIT)
    }

    /// Waits for it for so long.
    ///
    /// # Errors
    /// Those of [`Guest::hear`].
    pub fn hear_peer_within(&mut self, limit: Duration) -> Result<Answer> {
        match self.hear_within(limit)? {
            Reply::Said { line } => serde_json::from_str(&line).with_context(|| line.clone()),
            other => bail!("a peer was asked, and the guest answered {other:?}"),
        }
    }

    /// Asks a peer, and waits.
    ///
    /// # Errors
    /// As of both.
    pub fn ask_peer(&mut self, sockets: Sockets, ask: Ask) -> Result<Answer> {
        self.tell_peer(sockets, ask)?;
        self.hear_peer()
    }
}
