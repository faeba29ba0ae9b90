//! `nightporter flows`: selects and sorts connections, and shows them once or repeatedly.

use std::cmp::Reverse;
use std::io::{self, Write};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use nightporter_api::{FlowInfo, Reply, Request};

use crate::client::Client;
use crate::{names, print, show, unexpected};

/// States of a connection that has ended and is soon forgotten.
pub(crate) const OVER: [&str; 2] = ["closed", "reset"];
/// Moves the cursor of a terminal to the top left corner, and clears the screen.
pub(crate) const CLEAR: &str = "\x1b[H\x1b[2J";

/// The connections to show, and their order.
#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// Show only connections of this VM.
    #[arg(long, value_name = "VM", add = names::vms())]
    vm: Option<String>,
    /// Show only connections in this state.
    #[arg(long, value_enum, value_name = "STATE")]
    state: Option<State>,
    /// Show ended connections too. They are hidden by default, but not with --state or --json.
    #[arg(long)]
    all: bool,
    /// Show the connections with the largest value of this key first; by default, sort by number.
    #[arg(long, value_enum, value_name = "KEY")]
    sort: Option<Key>,
    /// Repeat every so many seconds (1 if no number is given) until Ctrl-C.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1")]
    watch: Option<u32>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum State {
    Handshake,
    On,
    Drain,
    Pass,
    Abort,
    Closed,
    Reset,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Key {
    /// Bytes held for the guest.
    Held,
    /// Bytes ever acknowledged ahead of the guest.
    Early,
    /// Time without a frame.
    Idle,
}

/// Shows connections.
pub(crate) fn show(client: &mut Client, json: bool, options: &Options) -> Result<()> {
    loop {
        let mut flows = first(client, options.vm.as_deref(), usize::MAX)?;
        options.select(&mut flows, json);
        let again = options.watch.filter(|_| !json);
        print(json, &flows, |out| {
            if again.is_some() {
                out.write_all(CLEAR.as_bytes())?;
            }
            show::flows(out, &flows)
        })?;
        let Some(seconds) = options.watch else { return Ok(()) };
        io::stdout().flush()?;
        thread::sleep(Duration::from_secs(seconds.max(1).into()));
    }
}

impl Options {
    fn select(&self, flows: &mut Vec<FlowInfo>, json: bool) {
        match self.state {
            Some(state) => {
                let name = state.to_possible_value().map(|value| value.get_name().to_owned());
                flows.retain(|flow| Some(&flow.state) == name.as_ref());
            }
            None if self.all || json => {}
            None => flows.retain(|flow| !OVER.contains(&flow.state.as_str())),
        }
        match self.sort {
            None => {}
            Some(Key::Held) => flows.sort_by_key(|flow| Reverse(flow.held_bytes)),
            Some(Key::Early) => flows.sort_by_key(|flow| Reverse(flow.early_acked_bytes)),
            Some(Key::Idle) => flows.sort_by_key(|flow| Reverse(flow.idle_s)),
        }
    }
}

/// Connections of all VMs, or of one: as many pages as have the first `most` of them.
pub(crate) fn first(client: &mut Client, vm: Option<&str>, most: usize) -> Result<Vec<FlowInfo>> {
    let mut all = Vec::new();
    let mut from = Some(0);
    while let Some(at) = from.filter(|_| all.len() < most) {
        match client.ask(&Request::Flows { vm: vm.map(Into::into), from: at })? {
            Reply::Flows(page) => {
                all.extend(page.flows);
                from = page.next;
            }
            other => return unexpected(&other),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_is_hidden_until_it_is_asked_for_and_the_largest_come_first() {
        let flow = |(id, state, held_bytes): (u64, &str, u64)| FlowInfo {
            id,
            state: state.into(),
            held_bytes,
            ..FlowInfo::default()
        };
        let ids = |options: Options, json: bool| {
            let all =
                [(1, "on", 5), (2, "closed", 0), (3, "pass", 0), (4, "on", 9), (5, "reset", 1)];
            let mut flows = all.map(flow).to_vec();
            options.select(&mut flows, json);
            flows.iter().map(|flow| flow.id).collect::<Vec<_>>()
        };
        let every = || Options { all: true, ..Options::default() };
        let of = |state| Options { state: Some(state), ..Options::default() };
        assert_eq!(ids(Options::default(), false), [1, 3, 4]);
        assert_eq!(ids(Options::default(), true), [1, 2, 3, 4, 5]);
        assert_eq!(ids(every(), false), [1, 2, 3, 4, 5]);
        assert_eq!((ids(of(State::On), false), ids(of(State::Reset), true)), (vec![1, 4], vec![5]));
        assert_eq!(ids(Options { sort: Some(Key::Held), ..every() }, false), [4, 1, 5, 2, 3]);
    }
}
