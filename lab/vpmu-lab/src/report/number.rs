//! How figures are written, in the terminal and in every document.

/// Writes a number with commas between thousands, and three decimals at most. A figure in percent, or a share
/// of one, is written in percent.
pub(super) fn number(value: f64, unit: &str) -> String {
    let (value, sign_behind) = match unit {
        "percent" => (value, " %"),
        "share" => (value * 100.0, " %"),
        _ => (value, ""),
    };
    let text = format!("{:.3}", value.abs());
    let (whole, decimals) = text.split_once('.').unwrap_or((&text, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    let decimals = decimals.trim_end_matches('0');
    let is_zero = whole == "0" && decimals.is_empty();
    let sign = if value < 0.0 && !is_zero { "-" } else { "" };
    let point = if decimals.is_empty() { "" } else { "." };
    format!("{sign}{grouped}{point}{decimals}{sign_behind}")
}

/// Writes a number with its unit behind it.
pub(super) fn quantity(value: f64, unit: &str) -> String {
    let number = number(value, unit);
    match unit {
        "" | "percent" | "share" => number,
        "us" => format!("{number} µs"),
        "1/s" => format!("{number} a second"),
        "exits" | "samples" | "interrupts" | "operations" | "points" | "boots" | "times"
        | "wake-ups"
            if number == "1" =>
        {
            format!("{number} {}", &unit[..unit.len() - 1])
        }
        _ => format!("{number} {unit}"),
    }
}

/// Writes how often `small` goes into `large`, in three digits. `None` where the quotient says nothing.
pub(super) fn factor(large: f64, small: f64) -> Option<String> {
    let factor = large / small;
    if !factor.is_finite() || factor <= 0.0 {
        return None;
    }
    let decimals = 2_i32.saturating_sub(factor.log10().floor() as i32).max(0);
    let scale = 10_f64.powi(decimals);
    Some(number((factor * scale).round() / scale, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        for (value, unit, text) in [
            (0.0, "", "0"),
            (-0.0001, "", "0"),
            (999.0, "", "999"),
            (1000.0, "ns", "1,000"),
            (12_617_503.0, "", "12,617,503"),
            (1234.5678, "", "1,234.568"),
            (-100.0, "", "-100"),
            (97.25, "percent", "97.25 %"),
            (0.0097, "share", "0.97 %"),
        ] {
            assert_eq!(number(value, unit), text);
        }
    }

    #[test]
    fn quantities_have_their_unit() {
        for (value, unit, text) in [
            (1.0, "exits", "1 exit"),
            (1.07, "exits", "1.07 exits"),
            (1.0, "ns", "1 ns"),
            (57.058, "us", "57.058 µs"),
            (0.5, "share", "50 %"),
            (7543.3, "1/s", "7,543.3 a second"),
            (1.5, "", "1.5"),
        ] {
            assert_eq!(quantity(value, unit), text);
        }
    }

    #[test]
    fn factors_have_three_digits() {
        for (large, small, text) in [
            (1.639, 0.998, Some("1.64")),
            (20.891, 1.069, Some("19.5")),
            (85_282_765.0, 97.0, Some("879,204")),
            (62_321.5, 62_721.9, Some("0.994")),
            (1.0, 0.0, None),
            (0.0, 0.0, None),
            (0.0, 1.0, None),
        ] {
            assert_eq!(factor(large, small).as_deref(), text, "{large} / {small}");
        }
    }
}
