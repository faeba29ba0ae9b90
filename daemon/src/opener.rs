//! Opens uplinks and overlays that are not there yet, or not any more, and puts uplinks back into
//! their bridges: aside, for all of that waits for the kernel's lock of the network configuration,
//! and closing an interface that was made in vain for much more.

use std::io;
use std::sync::Arc;

use crate::aside::Aside;
use crate::broker::Broker;
use crate::config::UplinkConfig;
use crate::port::{Port, Wanted};
use crate::start::{OpenFailure, open};

/// What is to be tried.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// It is missing.
    Open(Wanted),
    /// It is in no bridge, and should be in one.
    Join(UplinkConfig),
}

/// What has come of it.
#[derive(Debug)]
pub(crate) enum Done {
    Opened(Wanted, Result<Box<Port>, OpenFailure>),
    Joined(UplinkConfig, io::Result<()>),
}

/// Tries some of them, one after the other.
pub(crate) type Opener = Aside<Vec<Task>, Vec<Done>>;

/// Starts it. Errors: the system's.
pub(crate) fn start(broker: Arc<Broker>) -> io::Result<Opener> {
    let does = move |tasks: Vec<Task>| tasks.into_iter().map(|it| try_it(it, &broker)).collect();
    // What a mistake of ours keeps from being opened is tried again.
    Aside::start("opener", does, Vec::new)
}

fn try_it(task: Task, broker: &Broker) -> Done {
    match task {
        Task::Open(wanted) => {
            let opened = open(&wanted, broker).map(Box::new);
            Done::Opened(wanted, opened)
        }
        Task::Join(config) => {
            let joined = broker.join(&config);
            Done::Joined(config, joined)
        }
    }
}
