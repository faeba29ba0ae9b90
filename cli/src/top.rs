//! `nightporter top`: VMs or connections in a terminal, live and sorted, with the keys of htop.
//!
//! Once in an interval it asks the daemon for a status, as `vm list --watch` does; while
//! connections are shown, for at most [`FLOWS_MAX`] of them too. [`rows`] makes lines of the
//! answers, [`Top`] has the state that the keys change, and `draw` shows both.

mod rows;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};

use self::rows::{FLOW_COLUMNS, Lines, Looks, VM_COLUMNS};
use crate::client::Client;
use crate::{flows, status};

/// Connections that are looked at for a picture: 20 answers of the daemon.
const FLOWS_MAX: usize = 2_000;

const KEYS: &str = "F1 help  Enter connections  Tab all  < > sort  I invert  Z pause  F10 quit";
const HELP: [&str; 12] = [
    "Up, Down, PgUp, PgDn, Home, End   select a line",
    "Enter                             the connections of the selected VM",
    "Tab                               the connections of all VMs, and back",
    "Esc                               back to the VMs",
    "< >                               sort by another column",
    "I                                 invert the order",
    "Z                                 pause",
    "F1, h, ?                          this page",
    "F10, q, Ctrl-C                    quit",
    "",
    "SAVED: by how much the host's ACKs were ahead of the guest's in the last",
    "interval, as median and 99 %. EARLY: bytes acknowledged ahead of the guest.",
];

/// How often.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Options {
    /// Look again every so many seconds.
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=3600))]
    delay: u32,
}

/// Runs until the operator quits.
pub(crate) fn top(client: &mut Client, options: Options) -> Result<()> {
    if !io::stdout().is_terminal() {
        bail!("top needs a terminal\n    fix: use nightporter vm list --watch, or --json status")
    }
    let mut top = Top::default();
    let mut looks = Looks::default();
    looks.take(Instant::now(), status(client)?, Vec::new()); // errors belong on a whole screen
    let delay = Duration::from_secs(options.delay.into());
    ratatui::run(|terminal| -> Result<()> {
        let mut next = Instant::now();
        while !top.quits {
            if next <= Instant::now() {
                next = Instant::now() + delay;
                if !top.is_paused {
                    let flows = if top.shows_flows {
                        flows::first(client, top.vm.as_deref(), FLOWS_MAX)?
                    } else {
                        vec![]
                    };
                    looks.take(Instant::now(), status(client)?, flows);
                }
            }
            top.show(&looks);
            terminal.draw(|frame| top.draw(frame))?;
            if event::poll(next.saturating_duration_since(Instant::now()))?
                && let Event::Key(key) = event::read()?
                && key.kind != KeyEventKind::Release
                && top.handle_key(key)
            {
                next = Instant::now(); // another view
            }
        }
        Ok(())
    })
}

/// The view: its lines, their order, and the line that is selected.
#[derive(Debug, Default)]
struct Top {
    /// Connections, and not VMs.
    shows_flows: bool,
    /// Of this VM alone.
    vm: Option<String>,
    /// The column by which lines are sorted, of VMs and of connections.
    sort: [usize; 2],
    is_inverted: bool,
    is_paused: bool,
    shows_help: bool,
    quits: bool,
    selected: usize,
    /// Lines that fit the screen, as it was drawn last.
    page: usize,
    lines: Lines,
}

impl Top {
    fn columns(&self) -> &'static [rows::Column] {
        if self.shows_flows { FLOW_COLUMNS } else { VM_COLUMNS }
    }

    fn sort_mut(&mut self) -> &mut usize {
        &mut self.sort[usize::from(self.shows_flows)]
    }

    /// Takes the newest lines, in the order that is wanted.
    fn show(&mut self, looks: &Looks) {
        self.lines = if self.shows_flows { looks.flows() } else { looks.vms() };
        let sort = self.sort[usize::from(self.shows_flows)];
        self.lines.sort(sort, self.is_inverted);
        self.selected = self.selected.min(self.lines.rows.len().saturating_sub(1));
    }

    /// `true`: other lines have to be fetched.
    fn handle_key(&mut self, key: KeyEvent) -> bool {
        let (last, page) = (self.lines.rows.len().saturating_sub(1), self.page.max(1));
        if self.shows_help {
            self.shows_help = false;
            return false;
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if !is_control => {}
            KeyCode::F(10) | KeyCode::Char('q' | 'c') => self.quits = true,
            KeyCode::F(1) | KeyCode::Char('h' | '?') => self.shows_help = true,
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.selected = last.min(self.selected + 1),
            KeyCode::PageUp => self.selected = self.selected.saturating_sub(page),
            KeyCode::PageDown => self.selected = last.min(self.selected + page),
            KeyCode::Home => self.selected = 0,
            KeyCode::End => self.selected = last,
            KeyCode::Char('<') => *self.sort_mut() = self.sort_mut().saturating_sub(1),
            KeyCode::Char('>') => {
                let last = self.columns().len() - 1;
                *self.sort_mut() = last.min(*self.sort_mut() + 1);
            }
            KeyCode::Char('I') => self.is_inverted = !self.is_inverted,
            KeyCode::Char('Z') => self.is_paused = !self.is_paused,
            KeyCode::Enter if !self.shows_flows => {
                let selected = self.lines.rows.get(self.selected);
                return self.go(true, selected.map(|row| row.name.clone()));
            }
            KeyCode::Tab => return self.go(!self.shows_flows, None),
            KeyCode::Esc if self.shows_flows => return self.go(false, None),
            _ => {}
        }
        false
    }

    fn go(&mut self, shows_flows: bool, vm: Option<String>) -> bool {
        (self.shows_flows, self.vm, self.selected) = (shows_flows, vm, 0);
        (self.is_paused, self.is_inverted) = (false, false);
        true
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let heights = [Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)];
        let [head, middle, foot] = Layout::vertical(heights).areas(frame.area());
        frame.render_widget(Paragraph::new(self.lines.head.as_str()), head);
        let bar = Style::new().add_modifier(Modifier::REVERSED);
        let foot_text = if self.is_paused { "paused: Z goes on" } else { KEYS };
        frame.render_widget(Paragraph::new(foot_text).style(bar), foot);
        if self.shows_help {
            let help: Vec<_> = HELP.into_iter().map(Line::from).collect();
            frame.render_widget(Paragraph::new(help), middle);
        } else {
            self.draw_table(frame, middle, bar);
        }
    }

    fn draw_table(&mut self, frame: &mut Frame<'_>, area: Rect, bar: Style) {
        self.page = usize::from(area.height.saturating_sub(1));
        let columns = self.columns();
        let sort = self.sort[usize::from(self.shows_flows)];
        let heads = columns.iter().enumerate().map(|(i, column)| {
            let style = if i == sort { bar } else { Style::new().add_modifier(Modifier::BOLD) };
            Cell::from(column.aligned(column.name)).style(style)
        });
        let rows = self.lines.rows.iter().map(|row| {
            let cells = row.cells.iter().zip(columns);
            let cells = cells.map(|(cell, column)| Cell::from(column.aligned(&cell.text)));
            let style = if row.is_down { Style::new().fg(Color::Red) } else { Style::new() };
            Row::new(cells).style(style)
        });
        let widths = columns.iter().map(|column| Constraint::Length(column.width));
        let table = Table::new(rows, widths)
            .header(Row::new(heads))
            .column_spacing(1)
            .row_highlight_style(bar);
        let mut state = TableState::default().with_selected(Some(self.selected));
        frame.render_stateful_widget(table, area, &mut state);
    }
}

#[cfg(test)]
mod tests;
