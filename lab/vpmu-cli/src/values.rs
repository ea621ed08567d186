//! Values of options.

use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use strum::VariantNames;

/// One of several, by its name.
pub(crate) fn choice<T>() -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = strum::ParseError> + VariantNames + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(T::VARIANTS).try_map(|name| name.parse())
}

/// MiB from a number with M or G behind it.
pub(crate) fn memory(text: &str) -> Result<u32, String> {
    let wrong = || "a size is a number with M or G behind it, for example 512M".to_owned();
    let (number, unit) = text
        .strip_suffix(['G', 'g'])
        .map(|number| (number, 1024))
        .or_else(|| text.strip_suffix(['M', 'm']).map(|number| (number, 1)))
        .ok_or_else(wrong)?;
    let number: u32 = number.parse().map_err(|_| wrong())?;
    number
        .checked_mul(unit)
        .filter(|size| (1..=256 * 1024).contains(size))
        .ok_or_else(|| "from 1M to 256G".to_owned())
}

/// A time limit.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u32>() {
        Ok(0) | Err(_) => Err("a time limit is a whole number of seconds, at least 1".to_owned()),
        Ok(seconds) => Ok(Duration::from_secs(seconds.into())),
    }
}
