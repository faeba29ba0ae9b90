//! Opens uplinks and overlays whose interface or address does not exist yet, or no longer, puts
//! uplinks back into their bridges, and gives overlays the buffers that they could not get when
//! they were opened. It does so on a thread of its own, because all of that waits for the broker or
//! the kernel's lock of the network configuration, and closing an interface that was made in vain
//! waits for much more.

use std::io;

use crate::aside::Aside;
use crate::config::UplinkConfig;
use crate::port::build::{OpenFailure, Openings};
use crate::port::overlay::OverlaySockets;
use crate::port::{Port, Wanted};

/// An attempt.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// It is missing.
    Open(Wanted),
    /// It is in no bridge, and should be in one.
    Join(UplinkConfig),
    /// The overlay with this name has small buffers.
    Enlarge(String, OverlaySockets),
}

/// Its result.
#[derive(Debug)]
pub(crate) enum Done {
    Opened(Wanted, Result<Box<Port>, OpenFailure>),
    Joined(UplinkConfig, io::Result<()>),
    /// `true`: the buffers are still small, and another attempt may change that.
    Enlarged(String, OverlaySockets, bool),
}

/// Tries some of them, one after the other.
pub(crate) type Opener = Aside<Vec<Task>, Vec<Done>>;

/// Starts it. Errors: the system's.
pub(crate) fn start(openings: Openings) -> io::Result<Opener> {
    let does = move |tasks: Vec<Task>| tasks.into_iter().map(|it| try_it(it, &openings)).collect();
    // If a mistake of ours keeps something from being opened, it is tried again.
    Aside::start("opener", does, Vec::new)
}

fn try_it(task: Task, openings: &Openings) -> Done {
    match task {
        Task::Open(wanted) => {
            let opened = openings.open(&wanted).map(Box::new);
            Done::Opened(wanted, opened)
        }
        Task::Join(config) => {
            let joined = openings.broker.join(&config);
            Done::Joined(config, joined)
        }
        Task::Enlarge(name, sockets) => {
            let small = openings.enlarge(&name, &sockets, true);
            Done::Enlarged(name, sockets, small)
        }
    }
}
