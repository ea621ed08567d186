//! Draws a profile as a flame graph: a frame's width is its part of all samples, its callers are above.
//!
//! Frames are a list's items with places in percent. So the drawing fits any width and text keeps its size,
//! which the drawings of flame graph programs, made for one width and a script, do not.

use std::collections::BTreeMap;

use askama::Template;

use super::super::number::number;
use super::super::profile::Profile;
use super::render;

/// Frames that are narrower, in percent, have no room for a mouse.
const NARROWEST: f64 = 0.2;
/// Deeper frames are left out.
const DEEPEST: usize = 48;
/// The functions in the list beside the drawing.
const LISTED: usize = 8;
const TINTS: u32 = 6;

#[derive(Template)]
#[template(path = "flame.html")]
struct Flame<'a> {
    label: &'a str,
    samples: String,
    depth: usize,
    frames: Vec<Frame<'a>>,
    functions: Vec<(&'a str, String)>,
}

struct Frame<'a> {
    name: &'a str,
    title: String,
    depth: usize,
    x: f64,
    width: f64,
    tint: u32,
}

/// The samples of a frame and of its callees.
#[derive(Default)]
struct Node<'a> {
    samples: u64,
    callees: BTreeMap<&'a str, Node<'a>>,
}

/// Draws `profile`; `None` when it has no samples.
pub(super) fn flame(label: &str, profile: &Profile) -> Option<String> {
    let mut all = Node::default();
    let mut own: BTreeMap<&str, u64> = BTreeMap::new();
    for (stack, &samples) in &profile.folded {
        all.samples = all.samples.saturating_add(samples);
        let mut node = &mut all;
        for frame in stack.split(';').take(DEEPEST) {
            node = node.callees.entry(frame).or_default();
            node.samples = node.samples.saturating_add(samples);
        }
        let last = stack.rsplit(';').next().unwrap_or(stack);
        let count = own.entry(last).or_default();
        *count = count.saturating_add(samples);
    }
    if all.samples == 0 {
        return None;
    }
    let mut frames = Vec::new();
    place(&all, 0, 0.0, all.samples, &mut frames);
    let mut own: Vec<(&str, u64)> = own.into_iter().collect();
    own.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let functions = own.iter().take(LISTED);
    Some(render(&Flame {
        label,
        samples: number(all.samples as f64, ""),
        depth: frames
            .iter()
            .map(|frame| frame.depth + 1)
            .max()
            .unwrap_or(0),
        functions: functions
            .map(|&(name, samples)| (name, share(samples, all.samples)))
            .collect(),
        frames,
    }))
}

/// Places the callees of `node` beside each other from `x` on, and theirs below them. They stand in the order of their
/// names, so that two profiles of one program can be compared.
fn place<'a>(node: &Node<'a>, depth: usize, mut x: f64, all: u64, frames: &mut Vec<Frame<'a>>) {
    for (&name, callee) in &node.callees {
        let width = callee.samples as f64 / all as f64 * 100.0;
        if width >= NARROWEST {
            frames.push(Frame {
                name,
                title: format!("{name}: {}", share(callee.samples, all)),
                depth,
                x: hundredths(x),
                width: hundredths(width),
                tint: tint(name),
            });
            place(callee, depth + 1, x, all, frames);
        }
        x += width;
    }
}

fn share(samples: u64, all: u64) -> String {
    let percent = (samples as f64 / all as f64 * 1000.0).round() / 10.0;
    number(percent, "percent")
}

fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// A function has the same tint in every profile (FNV-1a).
fn tint(name: &str) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    name.bytes().fold(0x811c_9dc5, step) % TINTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(stacks: &[(&str, u64)]) -> Profile {
        let folded = stacks
            .iter()
            .map(|&(stack, count)| (stack.to_owned(), count));
        Profile {
            folded: folded.collect(),
        }
    }

    #[test]
    fn frames_are_as_wide_as_their_samples() {
        let profile = profile(&[
            ("main", 5),
            ("main;foo", 50),
            ("main;bar;<b>", 30),
            ("idle", 15),
        ]);
        let html = flame("guest", &profile).unwrap();
        for frame in [
            "left:15%;width:85%;top:calc(0*1.4em)",
            "left:15%;width:30%;top:calc(1*1.4em)",
            "left:45%;width:50%;top:calc(1*1.4em)",
            "left:0%;width:15%;top:calc(0*1.4em)",
        ] {
            assert!(html.contains(frame), "{frame}: {html}");
        }
        assert!(
            html.contains("100 samples") && !html.contains("<b>"),
            "{html}"
        );
        assert!(html.contains("<td>50 %</td>"), "{html}");
    }

    #[test]
    fn hostile_stacks_are_bounded() {
        let deep = "f;".repeat(100_000);
        let html = flame("guest", &profile(&[(&deep, u64::MAX), ("g", u64::MAX)])).unwrap();
        assert!(html.len() < 20_000, "{}", html.len());
        assert!(flame("guest", &profile(&[])).is_none());
        assert!(flame("guest", &profile(&[("f", 0)])).is_none());
    }
}
