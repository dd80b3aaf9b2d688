"""What engines share that sample on a server: its process, HTTP to it, requests that outlive a pause, a pool."""
