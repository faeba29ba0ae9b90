//! The thread that talks to etcd: one session at a time, with one member.
//!
//! A session: a lease (the old one if it still lives), all that is there, a watch from there on;
//! then claims, signs of life and what the watch says, until something goes wrong. Then there is
//! another session, with the next member, which begins with all that is there: so a compaction, a
//! watch that ended and a member that died are one case.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::api::{self, Done, Lease, Range, Refusal, Streamed, Token, Watched};
use super::http::{Conn, Lines};
use super::known::{KEYS_MAX, Known, Wanted};
use super::words::Key;
use super::{Config, Topic};
use crate::mail::{Bell, Gone, Inbox, Outbox};
use crate::{News, STATIONS_MAX};

/// Steps of one transaction: a member takes 128, and counts both levels (`--max-txn-ops`).
const STEPS_MAX: usize = 60;
/// How often steps are looked for again, as when others are faster.
const ROUNDS_MAX: usize = 8;
/// Between two rounds of all members, at first and at last.
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(1);
/// gRPC's code for a token that counts no longer.
const UNAUTHENTICATED: i64 = 16;

/// Why a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// It is not wanted any more.
    Stopped,
    /// The next one may go better, with the same member.
    Stale(String),
    /// The member does not answer as it should.
    Failed(String),
}

impl From<io::Error> for End {
    fn from(e: io::Error) -> Self {
        Self::Failed(e.to_string())
    }
}

impl From<Gone> for End {
    fn from(_: Gone) -> Self {
        Self::Stopped
    }
}

/// See the module doc.
pub(super) struct Thread {
    pub(super) config: Config,
    pub(super) bell: Bell,
    pub(super) wishes: Inbox<(Key, Option<Wanted>)>,
    pub(super) news: Outbox<Topic, News>,
    pub(super) known: Known,
    lease: Option<i64>,
    /// The member of this session or the next.
    member: usize,
    /// Members that have failed since one answered.
    failed: usize,
    rest: Duration,
}

/// Questions to one member.
struct Member<'a> {
    config: &'a Config,
    member: usize,
    conn: Conn,
    token: Option<String>,
}

impl Thread {
    pub(super) fn new(
        config: Config,
        bell: Bell,
        wishes: Inbox<(Key, Option<Wanted>)>,
        news: Outbox<Topic, News>,
    ) -> Self {
        let known = Known::new(&config.prefix, STATIONS_MAX);
        Self {
            config,
            bell,
            wishes,
            news,
            known,
            lease: None,
            member: 0,
            failed: 0,
            rest: REST_MIN,
        }
    }

    /// Until nobody wants it any more.
    pub(super) fn run(mut self) {
        loop {
            let address = self.config.members[self.member].address;
            let ended = match self.session() {
                End::Stopped => return,
                End::Stale(why) => {
                    tracing::info!(%address, "etcd: {why}; another session");
                    self.rest(REST_MIN)
                }
                End::Failed(why) => self.handle_failure(&format!("{address}: {why}")),
            };
            if ended.is_err() {
                return;
            }
        }
    }

    /// The next member is tried; if all have failed, after a while.
    fn handle_failure(&mut self, why: &str) -> Result<(), Gone> {
        self.member = (self.member + 1) % self.config.members.len();
        self.failed += 1;
        if self.failed < self.config.members.len() {
            tracing::info!("etcd: {why}; trying another member");
            return self.rest(Duration::ZERO);
        }
        self.failed = 0;
        self.news.post(Topic::Link, News::Link(Err(why.into())));
        let rest = self.rest;
        self.rest = REST_MAX.min(rest * 2);
        self.rest(rest)
    }

    /// Waits, and takes note of wishes meanwhile.
    fn rest(&mut self, time: Duration) -> Result<(), Gone> {
        let until = Instant::now() + time;
        loop {
            self.take_wishes()?;
            self.post_news();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            wait(&self.bell, None, left);
        }
    }

    fn take_wishes(&mut self) -> Result<(), Gone> {
        while let Some((key, wanted)) = self.wishes.take()? {
            self.known.want(key, wanted);
        }
        Ok(())
    }

    fn post_news(&mut self) {
        self.news.flush();
        for (topic, news) in self.known.take_news() {
            self.news.post(topic, news);
        }
    }

    /// A session with the member whose turn it is.
    fn session(&mut self) -> End {
        let config = self.config.clone();
        let begun = Member::open(&config, self.member).and_then(|mut member| {
            let lines = self.begin(&mut member)?;
            Ok((member, lines))
        });
        match begun {
            Err(end) => end,
            Ok((mut member, mut lines)) => {
                (self.failed, self.rest) = (0, REST_MIN);
                self.news.post(Topic::Link, News::Link(Ok(())));
                match self.serve(&mut member, &mut lines) {
                    Err(End::Stopped) => self.say_goodbye(&mut member),
                    Err(end) => end,
                    Ok(never) => match never {},
                }
            }
        }
    }

    fn begin(&mut self, member: &mut Member<'_>) -> Result<Lines, End> {
        let lives = match self.lease {
            Some(lease) => member.keep_alive(lease)?,
            None => false,
        };
        if !lives {
            let granted: Lease =
                member.ask("/v3/lease/grant", &json!({"TTL": self.config.ttl_s.to_string()}))?;
            self.lease = Some(granted.id);
            self.known.set_lease(granted.id);
        }
        let all: Range = member.ask("/v3/kv/range", &api::range(&self.config.prefix))?;
        let watch = api::watch(&self.config.prefix, all.header.revision + 1);
        let lines = member.follow("/v3/watch", &watch)?;
        look_for_room(all.kvs.len())?;
        self.known.set_all(all.kvs);
        Ok(lines)
    }

    fn serve(&mut self, member: &mut Member<'_>, lines: &mut Lines) -> Result<Never, End> {
        let interval = Duration::from_secs(self.config.ttl_s.into()) / 3;
        let mut sign_at = Instant::now() + interval;
        loop {
            for line in lines.take()? {
                self.handle_line(&line)?;
            }
            look_for_room(self.known.len())?;
            self.take_wishes()?;
            self.settle(member)?;
            self.post_news();
            if Instant::now() >= sign_at {
                sign_at = Instant::now() + interval;
                if !member.keep_alive(self.lease.unwrap_or_default())? {
                    return Err(End::Stale("the lease has run out".into()));
                }
            }
            let left = sign_at.saturating_duration_since(Instant::now());
            wait(&self.bell, Some(lines), left);
        }
    }

    fn handle_line(&mut self, line: &[u8]) -> Result<(), End> {
        let said: Streamed<Watched> = read(line)?;
        let Some(watched) = said.result else {
            return Err(End::Failed(format!("the watch ended: {:?}", said.error)));
        };
        if watched.compact_revision > 0 {
            return Err(End::Stale("what the watch was to begin with is compacted".into()));
        }
        if watched.canceled {
            return Err(End::Failed(format!("the watch was ended: {}", watched.cancel_reason)));
        }
        watched.events.into_iter().for_each(|event| self.known.handle_event(event));
        Ok(())
    }

    /// Makes what is there what is wanted.
    fn settle(&mut self, member: &mut Member<'_>) -> Result<(), End> {
        for _ in 0..ROUNDS_MAX {
            let steps = self.known.steps();
            if steps.is_empty() {
                return Ok(());
            }
            let lease = self.lease.unwrap_or_default();
            for part in steps.chunks(STEPS_MAX) {
                let (_, only): (Vec<_>, Vec<_>) = part.iter().cloned().unzip();
                let done: Done = member.ask("/v3/kv/txn", &api::transaction(&only, lease))?;
                for ((key, step), one) in part.iter().zip(done.responses) {
                    let outcome = one.response_txn;
                    self.known.handle_outcome(*key, step, outcome, done.header.revision);
                }
                self.post_news();
            }
        }
        Ok(())
    }

    /// What is of this host goes at once.
    fn say_goodbye(&self, member: &mut Member<'_>) -> End {
        let lease = json!({"ID": self.lease.unwrap_or_default().to_string()});
        if let Err(e) = member.ask::<Value>("/v3/lease/revoke", &lease) {
            tracing::info!("etcd: what is of this host stays until its lease runs out: {e:?}");
        }
        End::Stopped
    }
}

/// With more keys than there is room for what was known stays in force.
fn look_for_room(keys: usize) -> Result<(), End> {
    let too_many = || End::Failed(format!("there are {KEYS_MAX} keys or more below the prefix"));
    if keys < KEYS_MAX { Ok(()) } else { Err(too_many()) }
}

/// Nothing is of this type.
enum Never {}

impl<'a> Member<'a> {
    fn open(config: &'a Config, member: usize) -> Result<Self, End> {
        let mut new = Self { config, member, conn: connect(config, member)?, token: None };
        if let Some((name, password)) = &config.user {
            let login = json!({"name": name, "password": password});
            let got: Token = new.ask("/v3/auth/authenticate", &login)?;
            new.token = Some(got.token);
        }
        Ok(new)
    }

    fn ask<T: DeserializeOwned>(&mut self, path: &str, body: &Value) -> Result<T, End> {
        let body = body.to_string();
        let (status, answer) = self.conn.ask(path, self.token.as_deref(), body.as_bytes())?;
        if status == 200 {
            return read(&answer);
        }
        let refusal: Refusal = read(&answer).unwrap_or_default();
        let what = match refusal.message.as_str() {
            "" => String::from_utf8_lossy(&answer[..answer.len().min(200)]).into_owned(),
            message => message.into(),
        };
        match refusal.code {
            UNAUTHENTICATED if self.token.is_some() => Err(End::Stale(what)),
            _ => Err(End::Failed(format!("{what} (HTTP status {status})"))),
        }
    }

    /// A sign of life; whether the lease lives.
    fn keep_alive(&mut self, lease: i64) -> Result<bool, End> {
        let body = json!({"ID": lease.to_string()});
        let said: Streamed<Lease> = self.ask("/v3/lease/keepalive", &body)?;
        let lease = said.result.ok_or_else(|| End::Failed(format!("{:?}", said.error)))?;
        Ok(lease.ttl_s > 0)
    }

    /// A watch has a connection of its own.
    fn follow(&self, path: &str, body: &Value) -> Result<Lines, End> {
        let conn = connect(self.config, self.member)?;
        Ok(conn.follow(path, self.token.as_deref(), body.to_string().as_bytes())?)
    }
}

pub(super) fn connect(config: &Config, member: usize) -> io::Result<Conn> {
    Conn::open(config.members[member], config.connector.connect(member)?, config.tls.as_ref())
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, End> {
    serde_json::from_slice(bytes).map_err(|e| End::Failed(format!("not what etcd says: {e}")))
}

/// Until there are lines, the bell rings or the time is up.
fn wait(bell: &Bell, lines: Option<&Lines>, time: Duration) {
    let mut fds = vec![PollFd::from_borrowed_fd(bell.fd(), PollFlags::IN)];
    fds.extend(lines.map(|lines| PollFd::from_borrowed_fd(lines.fd(), PollFlags::IN)));
    let time = Timespec::try_from(time).ok();
    // Whatever it says, all is looked at.
    let _ = poll(&mut fds, time.as_ref());
}
