//! kill -9 at random instants: 5 times, 100 times with `STRATA_SOAK=1`. The killed process is this binary again, in
//! which `the_process_that_is_killed` writes until it dies. Afterwards every record that was reported as written and
//! not touched since is there, and no byte is wrong.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, Rig};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use strata_disk::{disk_usage, DiskConfig};
use strata_types::TransferError;

const ROOT: &str = "STRATA_KILL_TEST_ROOT";
const SEED: &str = "STRATA_KILL_TEST_SEED";
const CAP: u64 = 2 << 20;
const PLACES: u32 = 48;
const AT_ONCE: u32 = 3;

fn settings(root: &Path) -> DiskConfig {
    DiskConfig { sync_interval: Duration::from_millis(20), ..config(root, CAP, 4, 12_288) }
}

struct Draw(u64);

impl Draw {
    fn next(&mut self, below: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % below
    }
}

/// Announces each transfer before it is submitted and after it has completed.
#[test]
fn the_process_that_is_killed() {
    let Some(root) = std::env::var_os(ROOT) else { return };
    let seed: u64 = std::env::var(SEED).unwrap().parse().unwrap();
    let mut rig = Rig::open(settings(Path::new(&root)));
    let mut draw = Draw(seed);
    let say = |text: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}").unwrap();
        out.flush().unwrap();
    };
    for round in 1_u32.. {
        let first = draw.next(PLACES - AT_ONCE);
        let places: Vec<u32> = (first..first + AT_ONCE).collect();
        // Chains that no other life has written.
        let name = seed as u32 % 1000 * 40 + round % 40;
        if draw.next(5) == 0 {
            say(format!("TOUCH {first}"));
            assert_eq!(rig.erase(&places).error, None);
            say(format!("ERASED {first}"));
        } else {
            say(format!("TOUCH {first} {name}"));
            assert_eq!(rig.spill(&places, &chain(name, AT_ONCE, 4)).error, None);
            say(format!("WROTE {first} {name}"));
        }
    }
}

/// What is known of each place from what a process said before it died: the chain and the index in it of its record,
/// nothing, or that it is not known.
type Known = HashMap<u32, Option<(u32, u32)>>;

fn live_and_die(root: &Path, seed: u64, life: Duration, known: &mut Known) -> u32 {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_process_that_is_killed", "--nocapture", "--test-threads", "1"])
        .env(ROOT, root)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let killer = std::thread::spawn(move || {
        std::thread::sleep(life);
        child.kill().unwrap();
        child.wait().unwrap()
    });
    let mut wrote = 0;
    for line in output.split(b'\n') {
        let line = String::from_utf8_lossy(&line.unwrap()).into_owned();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words.get(index).and_then(|word| word.parse::<u32>().ok());
        match (words[0], number(1), number(2)) {
            ("TOUCH", Some(first), name) => {
                // A newer copy of a record replaces the older, whether or not its writer lived to say so.
                known.retain(|_, record| record.is_none_or(|(older, _)| Some(older) != name));
                (first..first + AT_ONCE).for_each(|place| {
                    known.insert(place, None);
                });
            }
            ("WROTE", Some(first), Some(name)) => {
                wrote += 1;
                (0..AT_ONCE).for_each(|index| {
                    known.insert(first + index, Some((name, index)));
                });
            }
            ("ERASED", Some(first), _) => (first..first + AT_ONCE).for_each(|place| {
                known.remove(&place);
            }),
            _ => {}
        }
    }
    assert!(!killer.join().unwrap().success(), "it was killed");
    wrote
}

#[test]
fn killed_at_random_instants() {
    let times = if std::env::var_os("STRATA_SOAK").is_some() { 100 } else { 5 };
    let root = tempfile::tempdir().unwrap();
    let mut draw = Draw(u64::from(std::process::id()));
    let mut known = Known::new();
    let (mut wrote, mut hits) = (0, 0);
    for time in 0..times {
        let life = Duration::from_micros(u64::from(60_000 + draw.next(150_000)));
        wrote += live_and_die(root.path(), time, life, &mut known);
        let mut rig = Rig::open(settings(root.path()));
        let found: HashMap<u32, _> =
            rig.recovered.records.iter().map(|found| (found.page.0, found.record.clone())).collect();
        for (place, record) in &known {
            let Some((name, index)) = record else { continue };
            let record = &chain(*name, AT_ONCE, 4)[*index as usize];
            assert_eq!(found.get(place), Some(record), "time {time}: place {place}, which was written");
        }
        let mut whole = 0;
        for (place, record) in &found {
            // `prefetch` proves the bytes of what it reports as whole.
            let done = rig.prefetch(&[*place], std::slice::from_ref(record));
            whole += done.pages_whole;
            let written = known.get(place).is_some_and(Option::is_some);
            assert!(done.error.is_none() || !written, "time {time}: place {place}: {done:?}");
            assert!(matches!(done.error, None | Some(TransferError::Corrupt { .. })), "{done:?}");
        }
        assert!(whole > 0, "time {time}: nothing came back");
        assert!(disk_usage(root.path()).unwrap() <= CAP);
        hits += whole;
    }
    eprintln!(
        "killed {times} times amid {wrote} spills of {AT_ONCE} pages: {hits} pages came back, none wrong"
    );
}
