-- wrk: the same POST over and over; the last line is JSON. The arguments are a body and headers as "name: value".
local refused = 0
function init(args)
  wrk.method = "POST"
  wrk.body = args[1]
  for place = 2, #args do
    local name, value = args[place]:match("^([^:]+): (.*)$")
    wrk.headers[name] = value
  end
end
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests":%d,"seconds":%.6f,"refused":%d,"broken":%d,"p50_ms":%.3f,"p99_ms":%.3f}\n',
    summary.requests, summary.duration / 1e6, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
