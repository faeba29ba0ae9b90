//! The configuration file, read for a reload by a thread of its own: a file system that does not
//! answer may block that thread for ever, and changes that need no file go on.

use std::cell::Cell;
use std::io;
use std::time::Duration;

use super::Refusal;
use super::prepare::problems;
use crate::aside::Aside;
use crate::config::{Config, Problems, Source};

/// A file is read within that. Less than the CLI waits for an answer.
const READ_MAX: Duration = Duration::from_secs(3);

/// See the module's doc.
#[derive(Debug)]
pub(super) struct File {
    /// `None`: a mistake of ours.
    reader: Aside<(), Option<Result<Config, Problems>>>,
    /// It has not been read since it was to be.
    stands: Cell<bool>,
}

impl File {
    /// Errors: the system's.
    pub(super) fn new(source: Source) -> io::Result<Self> {
        let reader = Aside::start("configuration", move |()| Some(source.load()), || None)?;
        Ok(Self { reader, stands: Cell::new(false) })
    }

    /// Its present content.
    pub(super) fn load(&self) -> Result<Config, Refusal> {
        match self.read()? {
            None => Err(Refusal::mistake()),
            Some(config) => config.map_err(|e| problems(&e)),
        }
    }

    /// Whether its file system lets it be read, whatever the content.
    pub(super) fn must_answer(&self) -> Result<(), Refusal> {
        self.read().map(|_| ())
    }

    fn read(&self) -> Result<Option<Result<Config, Problems>>, Refusal> {
        if self.stands.get() && self.reader.poll().is_none() {
            return Err(does_not_answer());
        }
        self.reader.begin(());
        let read = self.reader.wait(READ_MAX);
        self.stands.set(read.is_none());
        read.ok_or_else(does_not_answer)
    }
}

fn does_not_answer() -> Refusal {
    Refusal {
        what: format!("the configuration file was not read in {} s", READ_MAX.as_secs()),
        fix: "see to its file system, and try again; nothing was changed".into(),
    }
}
