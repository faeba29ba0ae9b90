//! The configuration file, read for a reload by a thread of its own: a file system that does not
//! answer may block that thread for ever, and everything else goes on.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

use super::Refusal;
use super::prepare::{problems, refusal};
use crate::config::{Config, Problems, Source};

/// A file is read within that. Less than the CLI waits for an answer.
const READ_MAX: Duration = Duration::from_secs(3);

/// See the module's doc.
#[derive(Debug)]
pub(crate) struct File {
    source: Source,
    /// A thread reads it that was not done in time.
    stands: Option<Receiver<Result<Config, Problems>>>,
}

impl File {
    pub(super) const fn new(source: Source) -> Self {
        Self { source, stands: None }
    }

    /// Its present content.
    pub(super) fn load(&mut self) -> Result<Config, Refusal> {
        self.read()?.map_err(|e| problems(&e))
    }

    /// Whether its file system lets it be read, whatever the content.
    pub(crate) fn must_answer(&mut self) -> Result<(), Refusal> {
        self.read().map(drop)
    }

    fn read(&mut self) -> Result<Result<Config, Problems>, Refusal> {
        if self.stands.as_ref().is_some_and(|it| it.try_recv() == Err(TryRecvError::Empty)) {
            return Err(does_not_answer());
        }
        let (done, read) = sync_channel(1);
        let source = self.source.clone();
        let thread = thread::Builder::new().name("configuration".into());
        let reads = move || drop(done.send(source.load()));
        thread.spawn(reads).map_err(|e| refusal(&e))?;
        let content = read.recv_timeout(READ_MAX);
        self.stands = matches!(content, Err(RecvTimeoutError::Timeout)).then_some(read);
        content.map_err(|e| match e {
            RecvTimeoutError::Timeout => does_not_answer(),
            RecvTimeoutError::Disconnected => Refusal::mistake(),
        })
    }
}

fn does_not_answer() -> Refusal {
    Refusal {
        what: format!("the configuration file was not read in {} s", READ_MAX.as_secs()),
        fix: "see to its file system, and try again; nothing was changed".into(),
    }
}
