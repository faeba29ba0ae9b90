//! `nightporterd`: reads the command line and the configuration, and runs the daemon.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser as _;
use nightporterd::arguments::Arguments;
use nightporterd::config::{Config, Source};
use nightporterd::log::{Log, set_filter_by};
use nightporterd::sandbox;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    nightporterd::find_stored(); // before others are opened
    let ended = become_daemon(arguments);
    nightporterd::let_go(); // if it did not start
    ended
}

fn become_daemon(arguments: Arguments) -> ExitCode {
    let overrides: BTreeMap<_, _> = arguments.set.into_iter().collect();
    // A reload reads it again, whatever the daemon's directory is by then.
    let path = std::path::absolute(&arguments.config).unwrap_or(arguments.config.clone());
    let config = match Config::load(&arguments.config, &overrides) {
        Ok(config) => config,
        Err(problems) => {
            complain(&problems);
            return ExitCode::FAILURE;
        }
    };
    if arguments.check {
        return check(&arguments.config, &config);
    }
    let config = match arguments.settle.then(|| nightporterd::settling(&config)) {
        None => config,
        Some(Some(config)) => config,
        Some(None) => return ExitCode::SUCCESS,
    };
    if let Err(error) = nightporterd::block_signals() {
        complain(&error);
    }
    let source = Source { path, overrides };
    let sandbox = match sandbox::enter(&config, &source) {
        Ok(sandbox) => sandbox,
        Err(error) => {
            complain(&error);
            return ExitCode::FAILURE;
        }
    };
    let log = match Log::start() {
        Ok(log) => log,
        Err(error) => {
            complain(&error);
            return ExitCode::FAILURE;
        }
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&config.daemon.log))
        .with_writer(log.lines())
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .with_filter_reloading();
    let filter = subscriber.reload_handle();
    set_filter_by(move |text| {
        let _ = filter.reload(EnvFilter::new(text)); // fails without a subscriber alone
    });
    subscriber.init();
    let run = if arguments.settle { nightporterd::settle } else { nightporterd::run };
    let result = run(&config, source, &sandbox);
    log.flush();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problems) => {
            problems.iter().for_each(complain);
            ExitCode::FAILURE
        }
    }
}

/// The configuration is good; so is the host, or not.
fn check(path: &Path, config: &Config) -> ExitCode {
    let judge = match nightporterd::Judge::become_daemon() {
        Ok(judge) => judge,
        Err(error) => {
            complain(&format!("this host: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let mut found = nightporterd::check_host(config, &judge);
    if let Err(e) = std::fs::File::open(path) {
        let what = format!("the daemon's user cannot read {}: {e}", path.display());
        found.problems.push(format!("{what}\n    fix: chmod o+r, or chgrp to its group"));
    }
    found
        .warnings
        .iter()
        .chain(&found.problems)
        .for_each(|what| complain(&format!("this host: {what}")));
    println!("{}: {}", path.display(), config.summary());
    if found.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Without a reader the text is lost.
fn complain(what: &impl Display) {
    let _ = writeln!(std::io::stderr(), "{what}");
}
