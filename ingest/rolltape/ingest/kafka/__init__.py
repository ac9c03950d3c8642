"""The event log over Apache Kafka: producers with a spool, topics, wire form; readers and the sink.

The vendor's client is imported in :mod:`rolltape.ingest.kafka.client` alone; it comes with the extra
``rolltape[kafka]``.
"""
